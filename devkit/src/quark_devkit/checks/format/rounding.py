"""Checks of `quark.numbers.NumberFormat.round_`: the value that a number is rounded to."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from quark.config.enums import RoundType
from quark.errors import QuarkError
from quark.numbers import NumberFormat, canonicalize, format_of
from quark_devkit.check import CheckFailedError, NotApplicableError, assume, check, require
from quark_devkit.checks.format.cases import Case, all_values, cases, numbers, one_case, refuse_vectors, shares_bits
from quark_devkit.random_states import random_states_kept

_SLACK = 1e-6
"""Relative error of float32 arithmetic on a distance, for decimal bounds."""
_PARTS = 16
_CALLS = 300
"""Far more calls than in other checks, to reveal objects that count their calls."""


def _rounded(case: Case, t: Tensor) -> Tensor:
    return case.format.round_(t.clone())


def _worst(t: Tensor, error: Tensor) -> str:
    return repr(float(t.reshape(-1)[int(error.argmax())]))


@check("format", each=one_case)
def rounds_in_place(case: Case) -> None:
    """``round_`` returns its argument itself, in float32 and with the same shape."""
    t = numbers(case)
    shape, rounded = t.shape, case.format.round_(t)
    require(isinstance(rounded, Tensor), f"returns {rounded!r} from round_, not its argument")
    require(rounded.shape == shape and rounded.dtype is torch.float32, f"rounds to {rounded.dtype} of shape {list(rounded.shape)}")
    require(rounded.data_ptr() == t.data_ptr(), "returns a different tensor from round_ than its argument")


@check("format", each=one_case)
def rounds_the_same_each_time(case: Case) -> None:
    """The same numbers are rounded to the same values each time, also after many calls, and no random state
    changes.
    """
    t = numbers(case)
    few = t[:1]
    with random_states_kept():
        first, first_few = _rounded(case, t), _rounded(case, few)
        for _ in range(_CALLS):
            require(torch.equal(_rounded(case, few), first_few), "rounds the same numbers to other values the next time")
        require(torch.equal(_rounded(case, t), first), "rounds the same numbers to other values the next time")


@check("format", each=cases)
def keeps_rounded_values(case: Case) -> None:
    """Rounding is idempotent: rounded values do not change again."""
    once = _rounded(case, numbers(case))
    twice = _rounded(case, once)
    require(torch.equal(once, twice), f"rounds its own value {_worst(once, (twice - once).abs())} to a different value")


@check("format", each=one_case)
def rounds_to_the_nearest_value(case: Case) -> None:
    """A number up to ``max_magnitude`` is rounded to the nearest value. If the record has an ``error_bound``,
    the rounding error is at most this bound instead.
    """
    refuse_vectors(case)
    t, bound = numbers(case), case.error_bound
    error = (_rounded(case, t).double() - t.double()).abs()
    if bound is not None:
        worst = float(error.max())
        require(worst <= bound * (1 + _SLACK), f"rounds {_worst(t, error)} to a value {worst:.6g} away, but declares error_bound={bound}")
        return
    values = all_values(case.format)
    if values is None:
        wanted = "its record has to declare error_bound, the largest rounding error"
        raise CheckFailedError(f"has values that share bits, or more than 2^16 values: {wanted}")
    too_far = error - _distance(t, values)
    worst, allowed = float(too_far.max()), float(t.abs().max()) * 1e-12
    require(worst <= allowed, f"rounds {_worst(t, too_far)} to a value {worst:.3g} further away than the nearest code")


def _distance(t: Tensor, values: Tensor) -> Tensor:
    """Return the distance of each number to the nearest value, in float64."""
    exact, t = values.double(), t.double()
    above = torch.searchsorted(exact, t).clamp(max=len(exact) - 1)
    return torch.minimum((t - exact[above]).abs(), (t - exact[(above - 1).clamp(min=0)]).abs())


@check("format", each=one_case)
def rounds_in_order(case: Case) -> None:
    """Rounding is monotonic: a larger number is not rounded to a smaller value."""
    refuse_vectors(case)
    assume(not shares_bits(case.format), "neighbours share bits, so a value depends on its neighbours")
    t = numbers(case, beyond=4).view(-1)
    falls = -_rounded(case, t).diff()
    require(float(falls.max()) <= 0, f"rounds a number above {_worst(t, falls)} to a smaller value")


@check("format", each=cases)
def saturates(case: Case) -> None:
    """Numbers above the largest value, including infinity, are rounded to the largest value. Numbers below
    the smallest value are rounded to the smallest value.
    """
    refuse_vectors(case)
    assume(not case.quantizer.is_float, "the format casts, and a cast turns too large values into infinity")
    listed = all_values(case.format) if case.is_scale else None
    values = _rounded(case, numbers(case, beyond=8)) if listed is None else listed
    for sign in (1,) if case.is_scale else (1, -1):
        end = float(values.max() if sign > 0 else values.min())
        beyond = [sign * x for x in (8 * case.max_magnitude, 1e30, 3.4e38, float("inf")) if x > sign * end]
        rounded = _rounded(case, torch.tensor(beyond).repeat_interleave(64).view(-1, 64))
        require(bool((rounded == end).all()), f"rounds {beyond} to {rounded.unique().tolist()}, not {end}")


@check("format", each=one_case)
def reaches_max_magnitude(case: Case) -> None:
    """Rounding moves ``max_magnitude`` by at most half the step between the two largest values of the
    format."""
    refuse_vectors(case)
    top = case.max_magnitude
    require(0 < top < float("inf"), f"says max_magnitude={top}, not a positive number")
    magnitudes = _rounded(case, numbers(case, beyond=4)).abs().unique()
    largest = float(magnitudes[-1])
    near = abs(float(_rounded(case, torch.full((1, 64), top))[0, 0]) - top)
    step = float(magnitudes[-1] - magnitudes[-2]) if len(magnitudes) > 1 else largest
    require(near <= step / 2 * (1 + _SLACK), f"says max_magnitude={top}, whose nearest value is {near:.3g} away: more than half a step")


@check("format", each=one_case)
def keeps_nan(case: Case) -> None:
    """NaN stays NaN under every rounding method that the format accepts."""
    if case.quantizer.is_float:
        return
    for _, number_format in _by_method(case, None, *RoundType):
        t = numbers(case)[:2].clone()
        t[0, 5] = torch.nan
        rounded = number_format.round_(t)
        require(bool(rounded[0, 5].isnan()), f"rounds NaN to {float(rounded[0, 5])}")
        require(not bool(rounded[1].isnan().any()), "turns numbers into NaN because another number is NaN")


@check("format", each=cases)
def makes_no_nan(case: Case) -> None:
    """Finite numbers, including zero, subnormal and huge numbers, are rounded to finite values."""
    largest = case.max_magnitude if case.quantizer.is_float else 3.4e38
    hard = torch.tensor([0.0, -0.0, 1e-45, 1e-40, 2.0**-126, 1e-20, 1.0, largest])
    t = torch.cat([hard, hard if case.is_scale else -hard]).repeat(4).view(1, -1)
    rounded = _rounded(case, t)
    bad = t[~rounded.isfinite()].tolist()[:1]
    require(not bad, f"rounds the finite number {bad} to NaN or infinity")


@check("format", each=cases)
def rounds_zero_to_zero(case: Case) -> None:
    """0 is rounded to 0."""
    refuse_vectors(case)
    assume(not case.is_scale, "the format holds only scales, which are never 0")
    rounded = _rounded(case, torch.zeros(1, 64))
    require(not bool(rounded.any()), f"rounds 0 to {float(rounded.abs().max())}")


@check("format", each=one_case)
def rounds_parts_in_threads(case: Case) -> None:
    """Parts of a tensor, rounded in several threads, equal the rounded whole."""
    t = numbers(case)[:32].repeat(_PARTS, 1) * torch.linspace(0.1, 1, 32 * _PARTS)[torch.randperm(32 * _PARTS)][:, None]
    if case.is_scale:
        t = t.clamp(min=1e-3)
    whole, by_part = _rounded(case, t), t.clone()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(case.format.round_, by_part.split(32)))
    require(torch.equal(by_part, whole), "rounds parts of a tensor in several threads differently from the whole: it keeps state")


@check("format", each=one_case)
def rounds_by_the_method_of_the_spec(case: Case) -> None:
    """Under every accepted ``round_method``, a number is rounded to a nearest value, and rounding twice
    changes nothing.
    """
    values = all_values(case.format)
    if values is None or case.quantizer.is_float or case.error_bound is not None:
        raise NotApplicableError("the format casts, or does not round to the nearest of a list of values")
    t = numbers(case).clamp(float(values[0]), float(values[-1]))
    above = values[torch.searchsorted(values, t).clamp(max=len(values) - 1)]
    below = values[(torch.searchsorted(values, t, right=True) - 1).clamp(min=0)]
    for method, number_format in _by_method(case, *RoundType):
        rounded = number_format.round_(t.clone())
        farther = (rounded - t).abs() > torch.minimum((above - t).abs(), (t - below).abs())
        require(not bool(farther.any()), f"rounds {_worst(t, farther.int())} by {method.name} to a value that is not the nearest")
        require(
            torch.equal(number_format.round_(rounded.clone()), rounded), f"rounds twice by {method.name} to a different value than once"
        )


def _by_method(case: Case, *methods: Any) -> Iterator[tuple[Any, NumberFormat]]:
    """Yield the accepted rounding methods, each with the format that uses it."""
    for method in methods:
        with suppress(QuarkError):
            canonical = canonicalize(case.example.spec.set(round_method=method))[0]
            number_format = format_of(canonical)
            if number_format.spec_error(canonical) is None:
                yield method, case.format if number_format.table_shape is not None else number_format


@check("format", each=one_case)
def splits_into_subscales_and_elements(case: Case) -> None:
    """If neighbours share bits, each element can be divided by its subscale, rounded with ``element_format``,
    and multiplied by the subscale. The result is the format's own value.
    """
    assume(shares_bits(case.format), "no neighbouring elements share bits")
    t = numbers(case)[torch.randperm(len(numbers(case)))].t().contiguous().view(-1, 64)
    subscales = case.format.subscales(t.clone())
    if subscales is None:
        raise CheckFailedError("has an element_format but returns no subscales")
    require(subscales.shape == t.shape, f"returns subscales of shape {list(subscales.shape)} for numbers of shape {list(t.shape)}")
    apart = case.format.element_format().round_(t / subscales) * subscales
    require(torch.equal(apart, _rounded(case, t)), "rounds elements under their subscales differently from whole groups")
