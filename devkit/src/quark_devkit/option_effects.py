"""Effects of options: whether a result is another one for a value of each option that is not its default."""

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
"""What a value that is not accepted raises."""
_NUMBERS = (2, 1, 4, 3, 0.5, 0.9, 0.1, 0.01, 0)
_NAME = "a_name_of_nothing"


def require_effects(
    options: Iterable[Option], results: Callable[[Mapping[str, Any]], Iterable[Any]], current: Mapping[str, Any] | None = None
) -> None:
    """Require that another value of each option is accepted and changes a result, or that none is accepted.

    Options that are declared to change speed or memory alone are left out
    (`quark.plugins.options.OptionNote`).

    Args:
        options: The options.
        results: Yields results, which are compared with ``==``, for these values of options, and the others
            as they are; raises one of `REFUSALS` where it refuses them.
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
    """Return whether a result is another than usual; None if one is refused."""
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
    """Return a short text that differs where tensors, or other values by their text, differ."""
    hashed = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            value = (str(value.dtype), tuple(value.shape), value.detach().double().cpu().numpy().tobytes())
        hashed.update(repr(value).encode())
    return hashed.hexdigest()


class _Remembered:
    """Iterates over values as often as is wanted, and computes each once, when it is first wanted."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.source = iter(values)
        self.known: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        yield from self.known
        for value in self.source:
            self.known.append(value)
            yield value


def others(option: Option, value: Any) -> Iterator[Any]:
    """Yield values to try: the examples, or else those that the type and the present value lead to."""
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
