"""Checks of observers: ranges are those of the data, alone or merged; and their options (`options`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quark.errors import CalibrationError, ConfigError, QuarkError
from quark.numbers import Observer
from quark_devkit.algorithm_runs import accelerator
from quark_devkit.check import NotApplicableError, check, require
from quark_devkit.example_specs import SHAPE, Example, examples, registered_formats
from quark_devkit.random_states import random_states_kept
from quark_devkit.subject import Subject

PARTS = ("options",)
Range = tuple[Tensor, Tensor]
_WIDEST = 8.0
_NARROWEST = 0.01
_CALLS = 100
"""More than other checks make, so that what counts its calls shows it."""


def data_of(seed: int = 0, shape: tuple[int, ...] = SHAPE) -> Tensor:
    """Normal values with a few large ones, off centre, the same each time."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) + 0.25
    x[..., 5] *= 12
    return x


def accepted_examples(subject: Subject) -> list[Example]:
    """The example specs that name the observer and are accepted, of all registered formats."""
    observer = subject.catalog.observers.load_observer(subject.lookup_name)
    return [example for example in examples(registered_formats(), observer.__name__) if len(example.quantizer.levels) == 1]


def examples_of(subject: Subject) -> list[Example]:
    """An example spec of each granularity that the observer serves, of the formats that accept it."""
    accepted = accepted_examples(subject)
    by_shape: dict[tuple[object, ...], Example] = {}
    for example in accepted:
        if not example.quantizer.is_float:
            level = example.quantizer.stored_level
            by_shape.setdefault((type(level.granularity), level.spec.symmetric is False), example)
    if not by_shape:
        casts = "only formats that cast accept this observer, and those have no ranges"
        raise NotApplicableError(casts if accepted else "no registered number format has a spec that accepts this observer")
    return list(by_shape.values())


def _observes_once(example: Example) -> bool:
    """Whether the observer refuses a second tensor, as those do that search a weight."""
    try:
        observed(example, data_of(), data_of())
    except CalibrationError:
        return True
    return False


def observed(example: Example, *tensors: Tensor) -> Observer:
    """Return an observer of an example that has seen these tensors."""
    observer = example.quantizer.observer()
    for x in tensors:
        observer.observe(x)
    return observer


def same_range(one: Range, other: Range) -> bool:
    """Return whether both ends of two ranges are equal, to the bit."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _close(one: Range, other: Range) -> bool:
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(one, other, strict=True))


def _for_each(subject: Subject, holds: Callable[[Example], bool], message: str) -> None:
    for example in examples_of(subject):
        require(holds(example), f"{message} ({example})")


@check("observer")
def serves_a_spec(subject: Subject) -> None:
    """At least one spec of a registered number format accepts the observer."""
    require(accepted_examples(subject), "is accepted by no spec of a registered number format")


@check("observer")
def gives_float32_ranges_of_the_shape_of_the_scales(subject: Subject) -> None:
    """Both ends of the range are finite float32 tensors of the granularity's scale shape, the low end not
    above the high one."""
    for example in examples_of(subject):
        low, high = observed(example, data_of()).range()
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
        x = data_of()
        observed(example, x)
        return torch.equal(x, data_of())

    _for_each(subject, unchanged, "changes the tensor that it observes")


@check("observer")
def keeps_no_reference_to_the_tensor(subject: Subject) -> None:
    """What happens to a tensor after it was observed does not change the range."""

    def independent(example: Example) -> bool:
        x = data_of()
        observer = observed(example, x)
        x.fill_(1e6)
        return same_range(observer.range(), observed(example, data_of()).range())

    _for_each(subject, independent, "gives another range once the observed tensor is overwritten: it keeps a reference to it")


@check("observer")
def does_not_change_by_being_asked(subject: Subject) -> None:
    """Asking for the range twice gives the same range, and does not disturb what is observed afterwards."""

    def stable(example: Example) -> bool:
        observer = observed(example, data_of())
        first = tuple(end.clone() for end in observer.range())
        return same_range((first[0], first[1]), observer.range())

    _for_each(subject, stable, "gives another range the second time it is asked")


@check("observer")
def starts_afresh(subject: Subject) -> None:
    """A new observer knows nothing of what another one has seen."""

    def fresh(example: Example) -> bool:
        before = observed(example, data_of(1)).range()
        observed(example, 50 * data_of(2))
        return same_range(before, observed(example, data_of(1)).range())

    _for_each(subject, fresh, "gives another range after another observer was used: they share state")


@check("observer", since=2)
def gives_the_same_each_time(subject: Subject) -> None:
    """The same tensor gives the same range each time, also after many observers, and no random state of the
    process is changed."""
    x = data_of()
    for example in examples_of(subject):
        with random_states_kept():
            first = observed(example, x).range()
            for _ in range(_CALLS):
                is_same = same_range(observed(example, x).range(), first)
                require(is_same, f"gives another range for the same tensor the next time ({example})")


@check("observer")
def merges_to_what_one_observer_sees(subject: Subject) -> None:
    """Two merged observers give the range of one that has seen both data sets, up to float32 rounding; or
    neither is possible."""
    for example in examples_of(subject):
        merged = observed(example, data_of(1))
        if _observes_once(example):
            try:
                merged.merge(observed(example, 3 * data_of(2)))
            except CalibrationError:
                continue
            require(False, f"refuses a second tensor, and merges with an observer that has seen another one ({example})")
        merged.merge(observed(example, 3 * data_of(2)))
        both = observed(example, data_of(1), 3 * data_of(2))
        require(_close(merged.range(), both.range()), f"merged, gives another range than one observer of all data ({example})")


@check("observer")
def does_not_depend_on_the_order_of_data(subject: Subject) -> None:
    """The same tensors in another order give the same range, up to float32 rounding."""
    for example in examples_of(subject):
        if _observes_once(example):
            continue
        parts = [data_of(1), 3 * data_of(2), 0.1 * data_of(3)]
        ranges = [observed(example, *order).range() for order in (parts, parts[::-1])]
        require(_close(*ranges), f"gives another range for the same tensors in another order ({example})")


@check("observer")
def refuses_to_merge_another_kind(subject: Subject) -> None:
    """Merging an observer of an unrelated class raises ConfigError
    (`quark.numbers.Observer.of_same_kind`)."""

    class Unrelated(Observer):
        def observe(self, x: Tensor) -> None: ...

        def range(self) -> Range:
            return torch.zeros(()), torch.zeros(())

        def merge(self, other: Observer) -> None: ...

    for example in examples_of(subject):
        observer = observed(example, data_of())
        try:
            observer.merge(Unrelated(example.quantizer.stored_level.spec, example.quantizer.granularity))
        except ConfigError:
            continue
        require(False, f"merges with an observer of an unrelated class ({example})")


@check("observer")
def merging_with_an_empty_one_changes_nothing(subject: Subject) -> None:
    """Merging an observer that has seen nothing, or merging into one, gives the range of the other."""

    def neutral(example: Example) -> bool:
        wanted = observed(example, data_of()).range()
        full, empty = observed(example, data_of()), observed(example)
        full.merge(observed(example))
        empty.merge(observed(example, data_of()))
        return same_range(full.range(), wanted) and same_range(empty.range(), wanted)

    _for_each(subject, neutral, "gives another range when an observer without data is merged")


@check("observer")
def has_no_range_without_data(subject: Subject) -> None:
    """Asked for a range before it has seen a value, it raises CalibrationError."""
    for example in examples_of(subject):
        for tensors in ((), (torch.zeros(0, SHAPE[1]),)):
            if tensors and example.quantizer.granularity.scale_shape((0, SHAPE[1])) != example.quantizer.granularity.scale_shape(SHAPE):
                continue  # a tensor without rows has no scales either
            try:
                observed(example, *tensors).range()
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
        return same_range(observed(example, data_of(), torch.zeros(0, SHAPE[1])).range(), observed(example, data_of()).range())

    _for_each(subject, unchanged, "gives another range after an empty tensor")


@check("observer")
def extremes_are_extremes(subject: Subject) -> None:
    """An observer that says ``is_extremes`` gives the smallest and the largest value of the elements with one
    scale, exactly.

    Specs without zero points may have ∓ the largest magnitude instead.
    """
    if not subject.catalog.observers.load_observer(subject.lookup_name).is_extremes:
        raise NotApplicableError("it does not say is_extremes")
    for example in examples_of(subject):
        granularity = example.quantizer.granularity
        parts = [data_of(1), 3 * data_of(2)]
        rows = torch.cat([granularity.rows(x) for x in parts], 1)
        shape = granularity.scale_shape(SHAPE)
        extremes = rows.amin(1).view(shape), rows.amax(1).view(shape)
        magnitude = rows.abs().amax(1).view(shape)
        seen = observed(example, *parts).range()
        is_magnitude = example.quantizer.stored_level.spec.symmetric is not False and same_range(seen, (-magnitude, magnitude))
        require(
            same_range(seen, extremes) or is_magnitude,
            f"says is_extremes and gives other ends than the smallest and the largest value ({example})",
        )


@check("observer")
def serves_hard_tensors(subject: Subject) -> None:
    """Zeros, constants, values of one sign, tiny and huge values give finite ranges whose low end is not
    above the high one."""
    hard = {
        "zeros": torch.zeros(SHAPE),
        "a constant": torch.full(SHAPE, -0.7),
        "positive values": data_of().abs() + 1,
        "negative values": -data_of().abs() - 1,
        "subnormal values": data_of() * 1e-40,
        "values of 1e30": data_of() * 1e30,
    }
    for example in examples_of(subject):
        for name, x in hard.items():
            low, high = observed(example, x).range()
            require(bool(low.isfinite().all() and high.isfinite().all()), f"gives a range that is not finite for {name} ({example})")
            require(bool((low <= high).all()), f"gives a low end above the high one for {name} ({example})")


@check("observer")
def does_not_depend_on_the_memory_layout(subject: Subject) -> None:
    """A tensor that is not contiguous gives the range of a contiguous copy."""

    def equal(example: Example) -> bool:
        wide = torch.zeros(SHAPE[0], 2 * SHAPE[1])
        wide[:, ::2] = data_of()
        return same_range(observed(example, wide[:, ::2]).range(), observed(example, data_of()).range())

    _for_each(subject, equal, "gives another range for a tensor that is not contiguous than for a copy that is")


@check("observer", level="advisory")
def works_on_an_accelerator(subject: Subject) -> None:
    """Of tensors on an accelerator, here a simulated one, it gives the range that it gives on a CPU, and
    gives it there."""
    for example in examples_of(subject):
        with accelerator() as device:
            ranges = observed(example, data_of().to(device.name)).range()
            require(all(end.device.type == device.name for end in ranges), f"gives a range on another device than the tensor's ({example})")
            found = ranges[0].cpu(), ranges[1].cpu()
        require(_close(found, observed(example, data_of()).range()), f"gives another range on an accelerator ({example})")


@check("observer")
def keeps_no_graph(subject: Subject) -> None:
    """Observing a tensor that requires gradients gives a range that does not: it would keep the graph of a
    whole forward alive."""

    def detached(example: Example) -> bool:
        return not any(end.requires_grad for end in observed(example, data_of().requires_grad_()).range())

    _for_each(subject, detached, "gives a range that requires gradients for a tensor that does")


def _reach(example: Example) -> Tensor:
    """Return how far from zero each range reaches, relative to the data."""
    granularity = example.quantizer.granularity
    largest = granularity.rows(data_of()).abs().amax(1).view(granularity.scale_shape(SHAPE))
    low, high = observed(example, data_of()).range()
    return torch.maximum(-low, high) / largest


@check("observer")
def reaches_not_far_beyond_the_data(subject: Subject) -> None:
    """The range reaches at most eight times as far from zero as the data do: a search may prefer wide ranges,
    and no more."""
    for example in examples_of(subject):
        worst = float(_reach(example).max())
        require(worst <= _WIDEST, f"gives a range {worst:.3g} times as far from zero as the data ({example})")


@check("observer")
def reaches_some_of_the_data(subject: Subject) -> None:
    """The range is nowhere empty, and reaches at least a hundredth as far from zero as the data do."""
    for example in examples_of(subject):
        least = float(_reach(example).min())
        require(least >= _NARROWEST, f"gives a range {least:.3g} times as far from zero as the data ({example})")


@check("observer")
def serves_16_bit_tensors(subject: Subject) -> None:
    """A bfloat16 or float16 tensor gives the range, in float32, of the same values in float32."""

    def equal(example: Example) -> bool:
        halves = [data_of().to(dtype) for dtype in (torch.bfloat16, torch.float16)]
        return all(same_range(observed(example, x).range(), observed(example, x.float()).range()) for x in halves)

    _for_each(subject, equal, "gives another range for a 16-bit tensor than for the same values in float32")


@check("observer")
def does_not_hide_nan_or_inf(subject: Subject) -> None:
    """NaN or Inf among the data makes the range NaN or infinite, or raises a QuarkError; it is not left out
    in silence."""
    for example in examples_of(subject):
        for bad in (torch.nan, torch.inf, -torch.inf):
            x = data_of()
            x[3, 7] = bad
            try:
                ends = observed(example, x).range()
            except QuarkError:
                continue
            require(not all(bool(end.isfinite().all()) for end in ends), f"gives a finite range for data with {bad} ({example})")
