"""Groups of options of one command: options that belong together are read into one object, by a function of their own."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

__all__ = ["with_groups"]


def with_groups(**groups: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator of commands, by which the options of a function stand in the place of the argument that the function returns.

    Args:
        groups: Functions whose arguments are options, each by the name of an argument of the command, which
            is no option.

    Example:
        >>> def size(width: int = 2, height: int = 3):
        ...     return width, height
        >>> @with_groups(size=size)
        ... def draw(text: str, size: object) -> None:
        ...     print(text, size)
        >>> draw(text="box", width=5)
        box (5, 3)
    """
    of_groups = {name: _parameters(read) for name, read in groups.items()}

    def decorator(command: Callable[..., None]) -> Callable[..., None]:
        every = [p for parameter in _parameters(command) for p in of_groups.get(parameter.name, [parameter])]

        @functools.wraps(command)
        def grouped(**values: Any) -> None:
            read = {}
            for name, parameters in of_groups.items():
                read[name] = groups[name](**{p.name: values.pop(p.name) for p in parameters if p.name in values})
            command(**values, **read)

        grouped.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
        grouped.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
        return grouped

    return decorator


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the arguments of a function by name, with their annotations as objects."""
    hints = typing.get_type_hints(function, include_extras=True)
    return [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints.get(name, parameter.annotation))
        for name, parameter in inspect.signature(function).parameters.items()
    ]
