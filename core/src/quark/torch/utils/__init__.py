"""``quark.torch.utils``: what AMD Quark's scripts take from there."""

from __future__ import annotations

from typing import Any

from quark.torch.utils.device import TPDeviceManager

__all__ = ["TPDeviceManager", "getattr_recursive", "setattr_recursive"]


def getattr_recursive(obj: Any, path: str) -> Any:
    """Return what a dotted path leads to; the empty path leads to ``obj`` itself. Raises AttributeError where it leads nowhere.

    >>> getattr_recursive("text", "upper.__name__")
    'upper'
    """
    for name in filter(None, path.split(".")):
        obj = getattr(obj, name)
    return obj


def setattr_recursive(obj: Any, path: str, value: Any) -> None:
    """Set what a dotted path leads to, such as a module of a model. Raises AttributeError where the path before the last name is wrong."""
    parent, _, name = path.rpartition(".")
    setattr(getattr_recursive(obj, parent), name, value)
