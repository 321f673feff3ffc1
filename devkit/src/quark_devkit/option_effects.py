"""Effects of options: whether results are others for values of each option that are not its default."""

from __future__ import annotations

import hashlib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import zip_longest
from typing import Any

from torch import Tensor

from quark.errors import QuarkError
from quark.plugins.options import REQUIRED, Option
from quark_devkit.check import assume, require

__all__ = ["REFUSALS", "digest", "others", "require_effects"]

REFUSALS = (QuarkError, ValueError, TypeError)
"""What a value that is not accepted raises."""
_NUMBERS = (2, 1, 4, 3, 0.5, 0.9, 0.1, 0.01, 0)
_MOST_VALUES = 3
"""Values of an option that are tried, of those that are accepted."""
_NAME = "a_name_of_nothing"


_Results = Callable[[Mapping[str, Any]], Iterable[Any]]


def require_effects(options: Iterable[Option], results: _Results, current: Mapping[str, Any] | None = None) -> None:
    """Require that each of several values of an option changes a result in its own way, or is refused.

    Each option changes a result beside the other value of each boolean option too. Options that are declared
    to change speed or memory alone are left out (`quark.plugins.options.OptionNote`).

    Args:
        options: The options.
        results: Yields results for the given values of options, with the other options unchanged. Results are
            compared with ``==``. It raises one of `REFUSALS` if it refuses the values.
        current: Values of options that differ from their defaults.

    Raises:
        NotApplicableError: There are no options.
    """
    options = [option for option in options if not option.note.is_cost_only]
    assume(options, "it has no options that change a result")
    values = {option.name: (current or {}).get(option.name, option.default) for option in options}
    flips = [{name: not value} for name, value in values.items() if isinstance(value, bool)]
    defaults, ignored = _Remembered(partial(results, {})), []
    for option in options:
        beside, value = dict(option.note.beside), values[option.name]
        given = partial(_beside, results, beside)
        usual = _Remembered(partial(results, beside)) if beside else defaults
        complaint, effective = _effect(option, value, usual, given)
        for flip in flips if effective is not None else ():
            if complaint is None and not flip.keys() & {option.name, *beside}:
                complaint = _effect_beside({option.name: effective}, flip, given)
        ignored += [f"'{option.name}' {complaint}"] if complaint else []
    fix = (
        "name values that each change a result by OptionNote(examples=…) in its annotation, or the values of other options that it "
        "needs by beside={…}; or say is_cost_only=True, or take it out"
    )
    require(not ignored, f"accepts these options, and values of them change nothing: {', '.join(ignored)}; {fix}")


def _beside(results: _Results, beside: Mapping[str, Any], values: Mapping[str, Any]) -> Iterable[Any]:
    return results({**beside, **values})


def _effect(option: Option, value: Any, usual: _Remembered, results: _Results) -> tuple[str | None, Any]:
    """Return what is wrong with the values of an option, or None, and a value that changes a result, or
    None.
    """
    seen, changing, idle = [(value, usual)], list[Any](), list[str]()
    stands_for_another = value is None  # so that one other value may do what it does
    for other in others(option, value):
        own = _Remembered(partial(results, {option.name: other}))
        same = [before for before, known in seen if _is_same(own, known)]
        if own.is_refused:
            continue
        if not same:
            changing.append(other)
        elif stands_for_another and same[0] is None:
            stands_for_another = False
        else:
            idle.append(f"{other!r}: as {same[0]!r}")
            if _is_number(other):
                break
        seen.append((other, own))
        if len(seen) > _MOST_VALUES:
            break
    matters = not changing or all(map(_is_number, changing))  # two names may stand for one thing, and no two numbers do
    wrong = f"({', '.join(idle)})" if idle and matters else None
    return wrong, changing[0] if changing else None


def _effect_beside(values: Mapping[str, Any], flip: Mapping[str, Any], results: _Results) -> str | None:
    """Return what is wrong with a value beside the other value of a boolean; None for nothing."""
    usual, own = (_Remembered(partial(results, given)) for given in (flip, {**flip, **values}))
    is_same = _is_same(own, usual)
    ((name, other),), (value,) = flip.items(), values.values()
    return None if own.is_refused or usual.is_refused or not is_same else f"({value!r} beside {name}={other}: as without it)"


def _is_same(one: _Remembered, other: _Remembered) -> bool:
    """Return whether all results are equal; False if one is refused."""
    for own, known in zip_longest(one, other):
        if one.is_refused or own != known:
            return False
    return not one.is_refused


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def digest(*values: Any) -> str:
    """Return a short text that differs if tensors differ, or the texts of other values."""
    hashed = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            value = (str(value.dtype), tuple(value.shape), value.detach().double().cpu().numpy().tobytes())
        hashed.update(repr(value).encode())
    return hashed.hexdigest()


class _Remembered:
    """Results, each computed once, when it is first wanted.

    Attributes:
        is_refused: Whether what computes them has raised one of `REFUSALS`, behind which nothing comes.
    """

    def __init__(self, compute: Callable[[], Iterable[Any]]) -> None:
        self.compute = compute
        self.source: Iterator[Any] | None = None
        self.known: list[Any] = []
        self.is_refused = False

    def __iter__(self) -> Iterator[Any]:
        yield from self.known
        while not self.is_refused:
            try:
                if self.source is None:
                    self.source = iter(self.compute())
                value = next(self.source)
            except StopIteration:
                return
            except REFUSALS:
                self.is_refused = True
                return
            self.known.append(value)
            yield value


def others(option: Option, value: Any) -> Iterator[Any]:
    """Yield values to try: the examples of the option. Without examples, yield values of its type and near
    ``value``."""
    tried = option.note.examples or [*_like(value), *([] if _is_number(value) else _of_type(option.type))]
    seen = [value]
    for other in tried:
        if other not in seen and other is not REQUIRED:
            seen.append(other)
            yield other


def _like(value: Any) -> Iterator[Any]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (2 * value, 4 * value, value // 2) if value > 1 else _NUMBERS[:4]
    elif isinstance(value, float):
        yield from (1.37 * value, value / 2, 3.3 * value) if value else (0.37, 0.1, 1.6)
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
