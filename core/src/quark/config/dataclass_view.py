"""Let ``dataclasses.replace``, ``fields`` and ``asdict`` work on attrs classes, as AMD Quark's documentation does."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import attrs

__all__ = ["T", "with_dataclass_view"]

T = TypeVar("T")


def with_dataclass_view(cls: type[T]) -> type[T]:
    """Give an attrs class the field table that the standard library's ``dataclasses`` functions look for.

    The table comes from a shadow dataclass with the same fields, so that only public functions are used.

    Example:
        >>> @with_dataclass_view
        ... @attrs.frozen
        ... class Point:
        ...     x: int = 0
        >>> dataclasses.replace(Point(1), x=2)
        Point(x=2)
    """
    rows: list[tuple[str, Any, Any]] = []
    for a in attrs.fields(cls):  # type: ignore[arg-type]
        spec: dict[str, Any] = {"init": a.init, "kw_only": True}
        if isinstance(a.default, attrs.Factory):  # type: ignore[arg-type]
            spec["default_factory"] = a.default.factory
        elif a.default is not attrs.NOTHING:
            spec["default_factory"] = lambda value=a.default: value
        rows.append((a.name, Any, dataclasses.field(**spec)))
    shadow = dataclasses.make_dataclass(cls.__name__, rows)
    cls.__dataclass_fields__ = shadow.__dataclass_fields__  # type: ignore[attr-defined]
    return cls
