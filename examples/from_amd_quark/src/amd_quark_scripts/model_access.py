"""The module ``quark.torch.utils`` for AMD Quark's scripts. It reads and sets attributes by dotted paths, and
manages devices."""

from __future__ import annotations

from typing import Any

from quark_amd.not_offered import not_offered

__all__ = ["TPDeviceManager", "getattr_recursive", "setattr_recursive"]


def getattr_recursive(obj: Any, path: str) -> Any:
    """Return the object at a dotted path. If the path is empty, return ``obj`` itself.

    Raise AttributeError if the path does not exist.

    >>> getattr_recursive("text", "upper.__name__")
    'upper'
    """
    for name in filter(None, path.split(".")):
        obj = getattr(obj, name)
    return obj


def setattr_recursive(obj: Any, path: str, value: Any) -> None:
    """Set the attribute at a dotted path, such as a module of a model.

    Raise AttributeError if the path before the last name does not exist.
    """
    parent, _, name = path.rpartition(".")
    setattr(getattr_recursive(obj, parent), name, value)


class TPDeviceManager:
    """AMD Quark's tensor parallelism for evaluation. It is not supported here. Use vLLM instead."""

    tp_mesh_init = staticmethod(not_offered("tensor-parallel evaluation", "evaluate the export with quark evaluate --backend vllm"))

    @staticmethod
    def tp_cleanup() -> None:
        """Do nothing, because there is no process group to destroy."""
