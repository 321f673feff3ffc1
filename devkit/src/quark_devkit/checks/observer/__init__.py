"""Checks of observers: ranges of single data sets and merged data sets, and options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from quark.errors import CalibrationError, ConfigError, QuarkError
from quark.numbers import Observer
from quark.plugins.options import observer_options
from quark_devkit.algorithm_runs import accelerator
from quark_devkit.check import NotApplicableError, assume, check, raises, require
from quark_devkit.example_specs import SHAPE, Example, examples, odd_specs, registered_formats
from quark_devkit.option_effects import digest, require_effects
from quark_devkit.random_states import random_states_kept
from quark_devkit.subject import Subject

PARTS = ("batches",)
Range = tuple[Tensor, Tensor]
_WIDEST = 8.0
_NARROWEST = 0.01
_CALLS = 100
"""More calls than in other checks, to reveal objects that count their calls."""


def data_of(seed: int = 0, shape: tuple[int, ...] = SHAPE) -> Tensor:
    """Return normally distributed values with an offset and a few outliers, the same for each seed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) + 0.25
    x[..., 5] *= 12
    return x


def accepted_examples(subject: Subject) -> list[Example]:
    """Return the example specs that use the observer and that registered formats accept."""
    observer = subject.load("observer")
    return [example for example in examples(registered_formats(), observer.__name__) if len(example.quantizer.levels) == 1]


def examples_of(subject: Subject) -> list[Example]:
    """Return an accepted example spec for each granularity of the observer."""
    accepted = accepted_examples(subject)
    by_shape: dict[tuple[object, ...], Example] = {}
    for example in accepted:
        if not example.quantizer.is_float:
            level = example.quantizer.stored_level
            by_shape.setdefault((type(level.granularity), level.spec.symmetric is False), example)
    if not by_shape:
        casts = "only formats that cast accept this observer, and they have no ranges"
        raise NotApplicableError(casts if accepted else "no registered number format has a spec that accepts this observer")
    return list(by_shape.values())


def observed(example: Example, *tensors: Tensor) -> Observer:
    """Return an observer for an example, after the observer has seen the given tensors."""
    observer = example.quantizer.observer()
    for x in tensors:
        observer.observe(x)
    return observer


def range_of(example: Example, *tensors: Tensor) -> Range:
    """Return the range that an observer for an example returns after it has seen the given tensors."""
    return observed(example, *tensors).range()


def same_range(one: Range, other: Range) -> bool:
    """Return whether both ends of two ranges are equal, to the bit."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def is_close(one: Range, other: Range) -> bool:
    """Return whether two ranges are equal up to float32 rounding."""
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(one, other, strict=True))


def observes_once(example: Example) -> bool:
    """Return whether the observer refuses a second tensor, as weight-searching observers do."""
    return raises(CalibrationError, observed, example, data_of(), data_of())


def _empty(example: Example) -> Tensor | None:
    """Return a tensor without rows. Return None if the example's granularity gives such a tensor no
    scales."""
    granularity, shape = example.quantizer.granularity, (0, SHAPE[1])
    return torch.zeros(shape) if granularity.scale_shape(shape) == granularity.scale_shape(SHAPE) else None


@check("observer")
def serves_a_spec(subject: Subject) -> None:
    """At least one spec of a registered number format accepts the observer."""
    require(accepted_examples(subject), "fits no spec of a registered number format")


@check("observer", each=examples_of)
def gives_float32_ranges_of_the_shape_of_the_scales(example: Example) -> None:
    """Both ends of the range are finite float32 tensors with the granularity's scale shape, and
    low ≤ high.
    """
    low, high = range_of(example, data_of())
    wanted = example.quantizer.granularity.scale_shape(SHAPE)
    for end in (low, high):
        require(isinstance(end, Tensor), f"returns {end!r} as an end of a range")
        require(tuple(end.shape) == wanted, f"returns a range of shape {list(end.shape)}, not {list(wanted)}")
        require(end.dtype is torch.float32, f"returns a range in {end.dtype}")
        require(bool(end.isfinite().all()), "returns a range that is not finite")
    require(bool((low <= high).all()), "returns a low end above the high one")


@check("observer", each=examples_of)
def leaves_the_tensor_as_it_is(example: Example) -> None:
    """Observing a tensor does not change it."""
    x = data_of()
    observed(example, x)
    require(torch.equal(x, data_of()), "changes the tensor that it observes")


@check("observer", each=examples_of)
def keeps_no_reference_to_the_tensor(example: Example) -> None:
    """Overwriting a tensor after it was observed does not change the range."""
    x = data_of()
    observer = observed(example, x)
    x.fill_(1e6)
    is_same = same_range(observer.range(), range_of(example, data_of()))
    require(is_same, "returns a different range after the observed tensor is overwritten: it keeps a reference")


@check("observer", each=examples_of)
def does_not_change_by_being_asked(example: Example) -> None:
    """Reading the range twice gives the same range and does not affect later observations."""
    observer = observed(example, data_of())
    low, high = (end.clone() for end in observer.range())
    require(same_range((low, high), observer.range()), "returns a different range the second time")


@check("observer", each=examples_of)
def starts_afresh(example: Example) -> None:
    """The range of a new observer does not depend on tensors that another observer has seen."""
    before = range_of(example, data_of(1))
    range_of(example, 50 * data_of(2))
    is_same = same_range(before, range_of(example, data_of(1)))
    require(is_same, "returns a different range after another observer was used: they share state")


@check("observer", since=2, each=examples_of)
def gives_the_same_each_time(example: Example) -> None:
    """The same tensor always gives the same range, also after many observers, and no random state changes."""
    x = data_of()
    with random_states_kept():
        first = range_of(example, x)
        for _ in range(_CALLS):
            require(same_range(range_of(example, x), first), "returns a different range for the same tensor the next time")


@check("observer", each=examples_of)
def merges_to_what_one_observer_sees(example: Example) -> None:
    """After two observers are merged, the range equals the range of one observer that has seen both data
    sets, up to float32 rounding. An observer that refuses a second tensor refuses a merge too.
    """
    merged, other = observed(example, data_of(1)), observed(example, 3 * data_of(2))
    if observes_once(example):
        is_refused = raises(CalibrationError, merged.merge, other)
        require(is_refused, "refuses a second tensor, but merges with an observer that has seen another tensor")
        return
    merged.merge(other)
    both = range_of(example, data_of(1), 3 * data_of(2))
    require(is_close(merged.range(), both), "returns a different range after a merge than one observer of all data")


@check("observer", each=examples_of)
def does_not_depend_on_the_order_of_data(example: Example) -> None:
    """The same tensors in another order give the same range, up to float32 rounding."""
    if observes_once(example):
        return
    parts = [data_of(1), 3 * data_of(2), 0.1 * data_of(3)]
    near = is_close(range_of(example, *parts), range_of(example, *reversed(parts)))
    require(near, "returns a different range for the same tensors in another order")


class _Unrelated(Observer):
    def observe(self, x: Tensor) -> None: ...

    def range(self) -> Range:
        return torch.zeros(()), torch.zeros(())

    def merge(self, other: Observer) -> None: ...


@check("observer", each=examples_of)
def refuses_to_merge_another_kind(example: Example) -> None:
    """Merging an observer of an unrelated class raises ConfigError
    (`quark.numbers.Observer.of_same_kind`)."""
    other = _Unrelated(example.quantizer.stored_level.spec, example.quantizer.granularity)
    is_refused = raises(ConfigError, observed(example, data_of()).merge, other)
    require(is_refused, "merges with an observer of an unrelated class")


@check("observer", each=examples_of)
def merging_with_an_empty_one_changes_nothing(example: Example) -> None:
    """If an observer is merged with an empty observer, in either direction, the range does not change."""
    wanted = range_of(example, data_of())
    for first, second in (((data_of(),), ()), ((), (data_of(),))):
        merged = observed(example, *first)
        merged.merge(observed(example, *second))
        require(same_range(merged.range(), wanted), "returns a different range when an observer without data is merged")


@check("observer", each=examples_of)
def has_no_range_without_data(example: Example) -> None:
    """Reading the range before any data raises CalibrationError."""
    empty = _empty(example)
    for tensors in ((), () if empty is None else (empty,)):
        require(raises(CalibrationError, range_of, example, *tensors), "returns a range without data")


@check("observer", each=examples_of)
def empty_tensors_do_not_count(example: Example) -> None:
    """Observing a tensor without elements changes nothing."""
    if (empty := _empty(example)) is not None:
        is_same = same_range(range_of(example, data_of(), empty), range_of(example, data_of()))
        require(is_same, "returns a different range after an empty tensor")


def _extreme_examples(subject: Subject) -> list[Example]:
    assume(subject.load("observer").is_extremes, "it does not set is_extremes")
    return examples_of(subject)


@check("observer", each=_extreme_examples)
def extremes_are_extremes(example: Example) -> None:
    """An observer with ``is_extremes`` returns exactly the smallest and largest value of the elements that
    share a scale.

    For specs without zero points, the observer may return ± the largest magnitude instead.
    """
    granularity = example.quantizer.granularity
    parts = [data_of(1), 3 * data_of(2)]
    rows = torch.cat([granularity.rows(x) for x in parts], 1)
    shape = granularity.scale_shape(SHAPE)
    seen, magnitude = range_of(example, *parts), rows.abs().amax(1).view(shape)
    is_magnitude = example.quantizer.stored_level.spec.symmetric is not False and same_range(seen, (-magnitude, magnitude))
    is_extreme = same_range(seen, (rows.amin(1).view(shape), rows.amax(1).view(shape)))
    require(is_extreme or is_magnitude, "sets is_extremes but does not return the smallest and the largest value")


@check("observer", each=examples_of)
def serves_hard_tensors(example: Example) -> None:
    """Zeros, constants, one-sided, tiny and huge values give finite ranges with low ≤ high."""
    hard = {
        "zeros": torch.zeros(SHAPE),
        "a constant": torch.full(SHAPE, -0.7),
        "positive values": data_of().abs() + 1,
        "negative values": -data_of().abs() - 1,
        "subnormal values": data_of() * 1e-40,
        "values of 1e30": data_of() * 1e30,
    }
    for name, x in hard.items():
        low, high = range_of(example, x)
        require(bool(low.isfinite().all() and high.isfinite().all()), f"returns a range that is not finite for {name}")
        require(bool((low <= high).all()), f"returns a low end above the high one for {name}")


@check("observer", each=examples_of)
def does_not_depend_on_the_memory_layout(example: Example) -> None:
    """A non-contiguous tensor gives the range of its contiguous copy."""
    wide = torch.zeros(SHAPE[0], 2 * SHAPE[1])
    wide[:, ::2] = data_of()
    is_same = same_range(range_of(example, wide[:, ::2]), range_of(example, data_of()))
    require(is_same, "returns a different range for a non-contiguous tensor than for its contiguous copy")


@check("observer", level="advisory", each=examples_of)
def works_on_an_accelerator(example: Example) -> None:
    """For tensors on a (simulated) accelerator, the observer returns a range on the accelerator. It equals
    the range on a CPU."""
    with accelerator() as device:
        low, high = range_of(example, data_of().to(device.name))
        require(low.device.type == high.device.type == device.name, "returns a range on another device than the tensor's")
        near = is_close((low.cpu(), high.cpu()), range_of(example, data_of()))
        require(near, "returns a different range on an accelerator")


@check("observer", each=examples_of)
def keeps_no_graph(example: Example) -> None:
    """The range never requires gradients, since such a range would keep the autograd graph of a whole forward
    pass in memory."""
    low, high = range_of(example, data_of().requires_grad_())
    require(not (low.requires_grad or high.requires_grad), "returns a range that requires gradients")


def _reach(example: Example) -> Tensor:
    """Return the magnitude of each range, divided by the largest magnitude in the data."""
    granularity = example.quantizer.granularity
    largest = granularity.rows(data_of()).abs().amax(1).view(granularity.scale_shape(SHAPE))
    low, high = range_of(example, data_of())
    return torch.maximum(-low, high) / largest


@check("observer", each=examples_of)
def reaches_not_far_beyond_the_data(example: Example) -> None:
    """The magnitude of each range is at most eight times the largest magnitude in the data."""
    worst = float(_reach(example).max())
    require(worst <= _WIDEST, f"returns a range {worst:.3g} times as far from zero as the data")


@check("observer", each=examples_of)
def reaches_some_of_the_data(example: Example) -> None:
    """No range is empty. The magnitude of each range is at least a hundredth of the largest magnitude in the
    data."""
    least = float(_reach(example).min())
    require(least >= _NARROWEST, f"returns a range {least:.3g} times as far from zero as the data")


@check("observer", each=examples_of)
def serves_16_bit_tensors(example: Example) -> None:
    """A bfloat16 or float16 tensor gives the same float32 range as its values in float32."""
    for dtype in (torch.bfloat16, torch.float16):
        x = data_of().to(dtype)
        is_same = same_range(range_of(example, x), range_of(example, x.float()))
        require(is_same, "returns a different range for a 16-bit tensor than for the same values in float32")


@check("observer", each=examples_of)
def does_not_hide_nan_or_inf(example: Example) -> None:
    """NaN or Inf in the data is not ignored: the range is NaN or infinite, or the observer raises a
    QuarkError."""
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = data_of()
        x[3, 7] = bad
        try:
            ends = range_of(example, x)
        except QuarkError:
            continue
        require(not all(bool(end.isfinite().all()) for end in ends), f"returns a finite range for data with {bad}")


def _range_with(observer: Any, example: Example, options: Mapping[str, Any]) -> Range:
    """Return the range of an observer class with some options.

    Raises:
        ConfigError: The observer refuses the options.
    """
    level = example.quantizer.stored_level
    spec = level.spec.set(observer_options=options)
    if (reason := observer.spec_error(spec)) is not None:
        raise ConfigError(reason)
    chosen = observer(spec, level.granularity)
    chosen.observe(data_of())
    low, high = chosen.range()
    return low, high


@check("observer")
def refuses_unknown_options(subject: Subject) -> None:
    """``spec_error`` refuses unknown observer options."""
    observer = subject.load("observer")
    for example in accepted_examples(subject):
        answer = observer.spec_error(example.spec.set(observer_options={"an_option_that_no_observer_has": 1}))
        require(isinstance(answer, str) and answer, f"accepts the option 'an_option_that_no_observer_has' ({example})")


@check("observer")
def accepts_the_defaults_of_its_options(subject: Subject) -> None:
    """Each listed option accepts its default. The range is then the same as without the option."""
    observer = subject.load("observer")
    options = observer_options(observer)
    assume(options, "it lists no options")
    for example in examples_of(subject):
        for option in options:
            try:
                chosen = _range_with(observer, example, {option.name: option.default})
            except ConfigError as error:
                require(False, f"refuses its own default of the option '{option.name}': {error} ({example})")
            is_same = same_range(chosen, range_of(example, data_of()))
            require(is_same, f"returns a different range with the option '{option.name}' at its default than without it ({example})")


@check("observer", since=2)
def heeds_its_options(subject: Subject) -> None:
    """Different values of an option give different ranges for some spec, whatever the boolean options are. A
    value may be refused instead, and an option may be declared to change only the cost."""
    observer = subject.load("observer")

    def results(values: Mapping[str, Any]) -> Iterator[str]:
        for example in examples_of(subject):
            yield digest(*_range_with(observer, example, values))

    require_effects(observer_options(observer), results)


@check("observer")
def answers_odd_specs(subject: Subject) -> None:
    """``spec_error`` returns None or a text for any spec, and never raises."""
    observer = subject.load("observer")
    for spec in odd_specs(registered_formats()):
        answer = observer.spec_error(spec)
        require(answer is None or (isinstance(answer, str) and answer), f"answers {answer!r}, not None or a reason ({spec})")
