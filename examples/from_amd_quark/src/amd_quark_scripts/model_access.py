"""``quark.torch.utils``: attributes by dotted paths, and devices, for AMD Quark's scripts."""

from __future__ import annotations

from typing import Any

from quark_amd.not_offered import not_offered

__all__ = ["TPDeviceManager", "getattr_recursive", "setattr_recursive"]


def getattr_recursive(obj: Any, path: str) -> Any:
    """Return the object at a dotted path; the empty path is ``obj`` itself.

    Raises AttributeError if the path does not exist.

    >>> getattr_recursive("text", "upper.__name__")
    'upper'
    """
    for name in filter(None, path.split(".")):
        obj = getattr(obj, name)
    return obj


def setattr_recursive(obj: Any, path: str, value: Any) -> None:
    """Set the attribute at a dotted path, such as a module of a model.

    Raises AttributeError if the path before the last name does not exist.
    """
    parent, _, name = path.rpartition(".")
    setattr(getattr_recursive(obj, parent), name, value)


class TPDeviceManager:
    """AMD Quark's tensor parallelism for evaluation, which is not supported: use vLLM."""

    tp_mesh_init = staticmethod(not_offered("tensor-parallel evaluation", "evaluate the export with quark evaluate --backend vllm"))

    @staticmethod
    def tp_cleanup() -> None:
        """Do nothing, since there is no process group to end."""
