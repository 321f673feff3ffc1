"""Field metadata, validators and a decorator for positional arguments, used by several configuration
classes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from attrs import validators

__all__ = ["LEGACY", "OWN", "PRESETS", "UNUSED", "given", "is_given", "of_preset", "positive", "with_positional"]

T = TypeVar("T")

LEGACY = {"legacy": True}
"""Metadata of a field of older AMD Quark releases. It is read from configurations and never written."""

UNUSED = {"unused": True}
"""Metadata of a field of AMD Quark's configurations that has no effect here. Configurations store it, but it
is not an option.
"""

OWN = {"own": True}
"""Metadata of a field that AMD Quark's class does not have. It is written only if its value is not the
default.
"""

positive: Callable[[Any, Any, Any], Any] = validators.gt(0)
"""Validator for numbers that must be above 0."""

PRESETS = ("best", "reference")
"""The presets. ``"best"`` has the settings with the lowest perplexity on held-out text. ``"reference"`` is
the published algorithm with AMD Quark's defaults.
"""


class _OfPreset(float):
    """A default value of AMD Quark that a preset may override."""


def of_preset(value: float) -> float:
    """Return a float that equals ``value`` and is marked as a default that a preset may override.

    A number that the user gives is a plain float, even if it equals the default. No preset changes a plain
    float.
    """
    return _OfPreset(value)


def given(value: float, preset: float | None = None) -> float:
    """Return ``value`` if the user gave it. Otherwise return ``preset``, or the default if ``preset`` is
    None.
    """
    return preset if preset is not None and not is_given(value) else float(value)


def is_given(value: float) -> bool:
    """Return whether the user gave ``value``. If not, it is a default."""
    return not isinstance(value, _OfPreset)


def with_positional(*names: str) -> Callable[[type[T]], type[T]]:
    """Return a class decorator. The decorated class also accepts the arguments ``names`` by position, in this
    order.

    >>> @with_positional("x", "y")
    ... class Point:
    ...     def __init__(self, *, y=0, x=0):
    ...         self.x, self.y = x, y
    >>> Point(1, 2).y
    2
    """

    def decorated(cls: type[T]) -> type[T]:
        by_name: Any = cls.__init__
        signature = inspect.signature(by_name)
        keywords = dict(signature.parameters)
        first = [keywords.pop("self"), *(keywords.pop(name) for name in names)]
        by_position = [each.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for each in first]

        @functools.wraps(by_name)
        def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
            if len(args) > len(names):
                raise TypeError(f"{cls.__name__} takes at most {len(names)} positional arguments, but got {len(args)}")
            if twice := [name for name in names[: len(args)] if name in kwargs]:
                raise TypeError(f"{cls.__name__} got '{twice[0]}' both by position and by name. Give it only once")
            by_name(self, **dict(zip(names, args, strict=False)), **kwargs)

        initialize.__signature__ = signature.replace(parameters=[*by_position, *keywords.values()])  # type: ignore[attr-defined]
        cls.__init__ = initialize  # type: ignore[method-assign]
        return cls

    return decorated
