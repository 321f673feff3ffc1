"""Checks of observers: the range that they give is that of the data they were shown, alone or merged."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quark.errors import CalibrationError, QuarkError
from quark.quantizers import Observer
from quark.testing.check import NotApplicableError, check, require
from quark.testing.example_specs import SHAPE, Example, examples, registered_formats
from quark.testing.subject import Subject

Range = tuple[Tensor, Tensor]


def _data(seed: int = 0, shape: tuple[int, ...] = SHAPE) -> Tensor:
    """Normal values with a few large ones, off centre, the same each time."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) + 0.25
    x[..., 5] *= 12
    return x


def _examples(subject: Subject) -> list[Example]:
    """An example spec of each granularity that the observer serves, of the formats that accept it."""
    observer = subject.catalog.observers.load_observer(subject.lookup_name)
    by_shape: dict[tuple[object, ...], Example] = {}
    for example in examples(registered_formats(), observer.__name__):
        by_shape.setdefault((example.spec.qscheme, example.spec.symmetric), example)
    if not by_shape:
        raise NotApplicableError("no registered number format has a spec that accepts this observer")
    return list(by_shape.values())


def _seen(example: Example, *tensors: Tensor) -> Observer:
    observer = example.quantizer.observer()
    for x in tensors:
        observer.observe(x)
    return observer


def _same(one: Range, other: Range) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _for_each(subject: Subject, holds: Callable[[Example], bool], message: str) -> None:
    for example in _examples(subject):
        require(holds(example), f"{message} ({example})")


@check("observer")
def serves_a_spec(subject: Subject) -> None:
    """At least one spec of a registered number format accepts the observer."""
    try:
        _examples(subject)
    except NotApplicableError as error:
        require(False, str(error))


@check("observer")
def gives_float32_ranges_of_the_shape_of_the_scales(subject: Subject) -> None:
    """Both ends of the range are finite float32 tensors of the granularity's scale shape, the low end not above the high one."""
    for example in _examples(subject):
        low, high = _seen(example, _data()).range()
        wanted = example.quantizer.granularity.scale_shape(SHAPE)
        for end in (low, high):
            require(isinstance(end, Tensor), f"gives {end!r} as an end of a range ({example})")
            require(tuple(end.shape) == wanted, f"gives a range of shape {list(end.shape)}, {list(wanted)} is wanted ({example})")
            require(end.dtype is torch.float32, f"gives a range in {end.dtype} ({example})")
            require(bool(end.isfinite().all()), f"gives a range that is not finite ({example})")
        require(bool((low <= high).all()), f"gives a low end above the high one ({example})")


@check("observer")
def leaves_the_tensor_as_it_is(subject: Subject) -> None:
    """Observing a tensor does not change it."""

    def unchanged(example: Example) -> bool:
        x = _data()
        _seen(example, x)
        return torch.equal(x, _data())

    _for_each(subject, unchanged, "changes the tensor that it observes")


@check("observer")
def keeps_no_reference_to_the_tensor(subject: Subject) -> None:
    """What happens to a tensor after it was observed does not change the range."""

    def independent(example: Example) -> bool:
        x = _data()
        observer = _seen(example, x)
        x.fill_(1e6)
        return _same(observer.range(), _seen(example, _data()).range())

    _for_each(subject, independent, "gives another range once the observed tensor is overwritten: it keeps a reference to it")


@check("observer")
def does_not_change_by_being_asked(subject: Subject) -> None:
    """Asking for the range twice gives the same range, and does not disturb what is observed afterwards."""

    def stable(example: Example) -> bool:
        observer = _seen(example, _data())
        first = tuple(end.clone() for end in observer.range())
        return _same((first[0], first[1]), observer.range())

    _for_each(subject, stable, "gives another range the second time it is asked")


@check("observer")
def starts_afresh(subject: Subject) -> None:
    """A new observer knows nothing of what another one has seen."""

    def fresh(example: Example) -> bool:
        before = _seen(example, _data(1)).range()
        _seen(example, 50 * _data(2))
        return _same(before, _seen(example, _data(1)).range())

    _for_each(subject, fresh, "gives another range after another observer was used: they share state")


@check("observer")
def merges_to_what_one_observer_sees(subject: Subject) -> None:
    """Two merged observers give the range of one that has seen both data sets, up to float32 rounding."""
    for example in _examples(subject):
        merged = _seen(example, _data(1))
        merged.merge(_seen(example, 3 * _data(2)))
        both = _seen(example, _data(1), 3 * _data(2)).range()
        for end, wanted in zip(merged.range(), both, strict=True):
            require(
                torch.allclose(end, wanted, rtol=1e-5, atol=1e-6), f"merged, gives another range than one observer of all data ({example})"
            )


@check("observer")
def merging_with_an_empty_one_changes_nothing(subject: Subject) -> None:
    """Merging an observer that has seen nothing, or merging into one, gives the range of the other."""

    def neutral(example: Example) -> bool:
        wanted = _seen(example, _data()).range()
        full, empty = _seen(example, _data()), _seen(example)
        full.merge(_seen(example))
        empty.merge(_seen(example, _data()))
        return _same(full.range(), wanted) and _same(empty.range(), wanted)

    _for_each(subject, neutral, "gives another range when an observer without data is merged")


@check("observer")
def has_no_range_without_data(subject: Subject) -> None:
    """Asked for a range before it has seen a value, it raises CalibrationError."""
    for example in _examples(subject):
        for tensors in ((), (torch.zeros(0, SHAPE[1]),)):
            if tensors and example.quantizer.granularity.scale_shape((0, SHAPE[1])) != example.quantizer.granularity.scale_shape(SHAPE):
                continue  # a tensor without rows has no scales either
            try:
                _seen(example, *tensors).range()
            except CalibrationError:
                continue
            require(False, f"gives a range without data ({example})")


@check("observer")
def empty_tensors_do_not_count(subject: Subject) -> None:
    """Observing a tensor without elements changes nothing."""

    def unchanged(example: Example) -> bool:
        granularity = example.quantizer.granularity
        if granularity.scale_shape((0, SHAPE[1])) != granularity.scale_shape(SHAPE):
            return True
        return _same(_seen(example, _data(), torch.zeros(0, SHAPE[1])).range(), _seen(example, _data()).range())

    _for_each(subject, unchanged, "gives another range after an empty tensor")


@check("observer")
def extremes_are_extremes(subject: Subject) -> None:
    """An observer that says ``is_extremes`` gives exactly the smallest and the largest value of each set of elements with one scale."""
    if not subject.catalog.observers.load_observer(subject.lookup_name).is_extremes:
        raise NotApplicableError("it does not say is_extremes")
    for example in _examples(subject):
        x, granularity = torch.cat([_data(1), 3 * _data(2)], 1), example.quantizer.granularity
        if granularity.scale_shape(SHAPE) != granularity.scale_shape((64, 128)):
            x = _data(1)
        parts = x.split(64, 1)
        rows = granularity.rows(x)
        shape = granularity.scale_shape(tuple(x.shape))
        low, high = _seen(example, *parts).range()
        require(
            torch.equal(low, rows.amin(1).view(shape)), f"says is_extremes and gives another low end than the smallest value ({example})"
        )
        require(
            torch.equal(high, rows.amax(1).view(shape)), f"says is_extremes and gives another high end than the largest value ({example})"
        )


@check("observer")
def covers_no_more_than_the_data(subject: Subject) -> None:
    """The range reaches no further from zero than the data do, by more than a factor of two (scales may be powers of two)."""
    for example in _examples(subject):
        x = _data()
        rows = example.quantizer.granularity.rows(x)
        largest = rows.abs().amax(1).view(example.quantizer.granularity.scale_shape(SHAPE))
        low, high = _seen(example, x).range()
        worst = float((torch.maximum(-low, high) / largest).max())
        require(worst <= 2.0 + 1e-5, f"gives a range {worst:.3g} times as large as the data ({example})")


@check("observer")
def serves_16_bit_tensors(subject: Subject) -> None:
    """A bfloat16 or float16 tensor gives the range, in float32, of the same values in float32."""

    def equal(example: Example) -> bool:
        halves = [_data().to(dtype) for dtype in (torch.bfloat16, torch.float16)]
        return all(_same(_seen(example, x).range(), _seen(example, x.float()).range()) for x in halves)

    _for_each(subject, equal, "gives another range for a 16-bit tensor than for the same values in float32")


@check("observer")
def does_not_hide_nan(subject: Subject) -> None:
    """NaN among the data makes the range NaN or raises a QuarkError; it is not left out in silence."""
    for example in _examples(subject):
        x = _data()
        x[3, 7] = torch.nan
        try:
            ends = _seen(example, x).range()
        except QuarkError:
            continue
        require(any(bool(end.isnan().any()) for end in ends), f"gives a range without NaN for data with NaN ({example})")


@check("observer")
def refuses_unknown_options(subject: Subject) -> None:
    """An observer option that it does not have is refused by ``spec_error``."""
    for example in _examples(subject):
        spec = example.spec.set(observer_options={"an_option_that_no_observer_has": 1})
        answer = subject.catalog.observers.load_observer(subject.lookup_name).spec_error(spec)
        require(isinstance(answer, str) and answer, f"accepts the option 'an_option_that_no_observer_has' ({example})")
