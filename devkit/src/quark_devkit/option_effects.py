"""Effects of options: whether a non-default value of each option changes a result."""

from __future__ import annotations

import hashlib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from quark.errors import QuarkError
from quark.plugins.options import REQUIRED, Option
from quark_devkit.check import assume, require

__all__ = ["REFUSALS", "digest", "others", "require_effects"]

REFUSALS = (QuarkError, ValueError, TypeError)
"""Exceptions that refuse a value."""
_NUMBERS = (2, 1, 4, 3, 0.5, 0.9, 0.1, 0.01, 0)
_NAME = "a_name_of_nothing"


def require_effects(
    options: Iterable[Option], results: Callable[[Mapping[str, Any]], Iterable[Any]], current: Mapping[str, Any] | None = None
) -> None:
    """Require that another value of each option changes a result, or that no other value is accepted.

    Options that are declared to change only speed or memory are left out
    (`quark.plugins.options.OptionNote`).

    Args:
        options: The options.
        results: Yields results for some option values, compared with ``==``; raises one of `REFUSALS` to
            refuse them.
        current: Values of options that differ from their defaults.

    Raises:
        NotApplicableError: There are no options.
    """
    options = [option for option in options if not option.note.is_cost_only]
    assume(options, "it has no options that change a result")
    ignored = []
    defaults = _Remembered(results({}))
    for option in options:
        value = (current or {}).get(option.name, option.default)
        beside, accepted = dict(option.note.beside), []
        usual = _Remembered(results(beside)) if beside else defaults
        for other in others(option, value):
            changes = _changes(partial(results, {**beside, option.name: other}), usual)
            if changes:
                break
            if changes is not None:
                accepted.append(other)
        else:
            ignored += [f"'{option.name}' ({', '.join(map(repr, accepted))}: as {value!r})"] if accepted else []
    fix = "name a value with an effect in OptionNote(examples=…) of its annotation, set is_cost_only=True there, or remove the option"
    require(not ignored, f"accepts options whose values change nothing: {', '.join(ignored)}; {fix}")


def _changes(results: Callable[[], Iterable[Any]], usual: Iterable[Any]) -> bool | None:
    """Return whether a result differs from the default's; None if a value is refused."""
    try:
        ours = iter(results())
    except REFUSALS:
        return None
    for before in usual:
        try:
            one = next(ours)
        except REFUSALS:
            return None
        if one != before:
            return True
    return False


def digest(*values: Any) -> str:
    """Return a short text that differs if tensors, or the texts of other values, differ."""
    hashed = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            value = (str(value.dtype), tuple(value.shape), value.detach().double().cpu().numpy().tobytes())
        hashed.update(repr(value).encode())
    return hashed.hexdigest()


class _Remembered:
    """Iterates over values repeatedly, and computes each value once, on first use."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.source = iter(values)
        self.known: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        yield from self.known
        for value in self.source:
            self.known.append(value)
            yield value


def others(option: Option, value: Any) -> Iterator[Any]:
    """Yield values to try: the examples, or values that follow from the type and the current value."""
    tried = option.note.examples or [*_like(value), *_of_type(option.type)]
    seen = [value]
    for other in tried:
        if other not in seen and other is not REQUIRED:
            seen.append(other)
            yield other


def _like(value: Any) -> Iterator[Any]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (2 * value, value + 1, value // 2)
    elif isinstance(value, float):
        yield from (value / 2, 2 * value)
    elif isinstance(value, list | tuple) and value:
        yield value[:1] if len(value) > 1 else value[:0]
    elif isinstance(value, dict) and value:
        yield dict(list(value.items())[:-1])


def _of_type(hint: Any) -> Iterator[Any]:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        yield from inner
    elif hint is bool:
        yield from (True, False)
    elif hint in (int, float):
        yield from (number for number in _NUMBERS if hint is float or isinstance(number, int))
    elif hint is str:
        yield _NAME
    elif str in inner and origin in (list, tuple):
        yield origin([_NAME])
    elif origin in (typing.Union, types.UnionType):
        for one in inner:
            yield from _of_type(one)
