"""Effects of options: whether different values of an option give different results."""

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
"""Errors that mean that a value is not accepted."""
_NUMBERS = (2, 1, 4, 3, 0.5, 0.9, 0.1, 0.01, 0)
_MOST_VALUES = 3
"""Number of accepted values of an option to try."""
_NAME = "a_name_of_nothing"


_Results = Callable[[Mapping[str, Any]], Iterable[Any]]


def require_effects(options: Iterable[Option], results: _Results, current: Mapping[str, Any] | None = None) -> None:
    """Require that different values of an option give different results, unless a value is refused.

    This must also be true if a boolean option has its other value. Options that are declared to change only
    speed or memory (`quark.plugins.options.OptionNote`) are left out.

    Args:
        options: The options.
        results: Yields results for the given values of options, with the other options unchanged. Results are
            compared with ``==``. The function raises one of `REFUSALS` if the values are refused.
        current: Values of options that differ from their defaults.

    Raises:
        NotApplicableError: There are no options.
    """
    options = [option for option in options if not option.note.is_cost_only]
    assume(options, "it has no options that change a result")
    values = {option.name: (current or {}).get(option.name, option.default) for option in options}
    flips = [{name: not value} for name, value in values.items() if isinstance(value, bool)]
    runs, ignored = _Runs(results), []
    for option in options:
        beside = dict(option.note.beside)
        given = partial(_beside, runs, beside)
        complaint, effective = _effect(option, values[option.name], given)
        for flip in flips if effective is not None else ():
            if complaint is None and not flip.keys() & {option.name, *beside}:
                complaint = _effect_beside({option.name: effective}, flip, given)
        ignored += [f"'{option.name}' {complaint}"] if complaint else []
    fix = (
        "list values that each change a result in OptionNote(examples=…) of the option's annotation, or values of other options that it "
        "needs in beside={…}; or set is_cost_only=True, or remove the option"
    )
    require(not ignored, f"accepts these options, but some of their values change nothing: {', '.join(ignored)}; {fix}")


def _beside(runs: _Runs, beside: Mapping[str, Any], values: Mapping[str, Any]) -> _Remembered:
    return runs({**beside, **values})


def _effect(option: Option, value: Any, results: Callable[[Mapping[str, Any]], _Remembered]) -> tuple[str | None, Any]:
    """Return a complaint about an option's values, or None, and a value that changes a result, or None."""
    seen, changing, idle = [(value, results({}))], list[Any](), list[str]()
    stands_for_another = value is None  # None may have the effect of one other value
    for other in others(option, value):
        own = results({option.name: other})
        same = [before for before, known in seen if _is_same(own, known)]
        if own.is_refused:
            continue
        if not same:
            changing.append(other)
        elif stands_for_another and same[0] is None:
            stands_for_another = False
        else:
            idle.append(f"{other!r} gives the results of {same[0]!r}")
            if _is_number(other):
                break
        seen.append((other, own))
        if len(seen) > _MOST_VALUES:
            break
    matters = not changing or all(map(_is_number, changing))  # two names may mean the same, but two numbers may not
    wrong = f"({', '.join(idle)})" if idle and matters else None
    return wrong, changing[0] if changing else None


def _effect_beside(values: Mapping[str, Any], flip: Mapping[str, Any], results: Callable[[Mapping[str, Any]], _Remembered]) -> str | None:
    """Return a complaint if a value changes nothing when a boolean option has its other value; else None."""
    usual, own = results(flip), results({**flip, **values})
    is_same = _is_same(own, usual)
    ((name, other),), (value,) = flip.items(), values.values()
    return None if own.is_refused or usual.is_refused or not is_same else f"({value!r} changes nothing with {name}={other})"


def _is_same(one: _Remembered, other: _Remembered) -> bool:
    """Return whether all results are equal. Return False if the values of one run are refused."""
    for own, known in zip_longest(one, other):
        if one.is_refused or own != known:
            return False
    return not one.is_refused


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def digest(*values: Any) -> str:
    """Return one hash of all values: of the bytes of tensors, and of the ``repr`` of other values."""
    hashed = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            value = (str(value.dtype), tuple(value.shape), value.detach().double().cpu().numpy().tobytes())
        hashed.update(repr(value).encode())
    return hashed.hexdigest()


class _Remembered:
    """Results that are computed once each, on first use.

    Attributes:
        is_refused: Whether the computation has raised one of `REFUSALS`. No result follows after that.
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


class _Runs:
    """The results for each set of option values. Each is computed once, since several options are compared
    with the same run."""

    def __init__(self, results: _Results) -> None:
        self._results = results
        self._known: dict[str, _Remembered] = {}

    def __call__(self, values: Mapping[str, Any]) -> _Remembered:
        return self._known.setdefault(repr(sorted(values.items())), _Remembered(partial(self._results, values)))


def others(option: Option, value: Any) -> Iterator[Any]:
    """Yield values of an option to try.

    These are the examples of the option. If the option has no examples, they are values of the option's type
    and values near ``value``.
    """
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
