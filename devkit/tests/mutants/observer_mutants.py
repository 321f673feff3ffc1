"""Observers with one thing wrong each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quark.base.lazy import ObjectRef
from quark.config.tensor import QTensorConfig
from quark.errors import CalibrationError
from quark.numbers import Granularity, Observer
from quark.plugins import ObserverRecord

from .mutant import Mutant

__all__ = ["HEALTHY", "MUTANTS"]


class PlainObserver(Observer):
    """Smallest and largest value: the healthy observer from which the mutants differ in one thing.

    Attributes:
        share: Share of the range that is kept.
    """

    is_extremes = True
    options = ("share",)
    share = 1.0

    def __init__(self, spec: QTensorConfig, granularity: Granularity) -> None:
        super().__init__(spec, granularity)
        self.low: Tensor | None = None
        self.high: Tensor | None = None

    @classmethod
    def spec_error(cls, spec: QTensorConfig) -> str | None:
        unknown = [name for name, _ in spec.observer_options if name not in cls.options]
        return f"it has no option {unknown[0]}: its only one is share" if unknown else None

    def observe(self, x: Tensor) -> None:
        if x.numel():
            rows = self.granularity.rows(x.detach().float())
            shape = self.granularity.scale_shape(tuple(x.shape))
            self.add(rows.amin(1).view(shape), rows.amax(1).view(shape))

    def add(self, low: Tensor, high: Tensor) -> None:
        self.low = low if self.low is None else torch.minimum(self.low, low)
        self.high = high if self.high is None else torch.maximum(self.high, high)

    def range(self) -> tuple[Tensor, Tensor]:
        if self.low is None or self.high is None:
            raise CalibrationError("nothing was observed")
        share = float(dict(self.spec.observer_options).get("share", self.share))
        return self.low * share, self.high * share

    def merge(self, other: Observer) -> None:
        same = self.of_same_kind(other)
        if same.low is not None and same.high is not None:
            self.add(same.low, same.high)


class ServesNothing(PlainObserver):
    @classmethod
    def spec_error(cls, spec: QTensorConfig) -> str | None:
        return "it serves nothing"


class GivesOnTheCpu(PlainObserver):
    def range(self) -> tuple[Tensor, Tensor]:
        low, high = super().range()
        return low.cpu(), high.cpu()


class GivesDoubles(PlainObserver):
    def range(self) -> tuple[Tensor, Tensor]:
        low, high = super().range()
        return low.double(), high.double()


class GivesOneRange(PlainObserver):
    def range(self) -> tuple[Tensor, Tensor]:
        low, high = super().range()
        return low.min().view(1), high.max().view(1)


class GivesNumbers(PlainObserver):
    def range(self) -> Any:
        return tuple(float(end.max()) for end in super().range())


class Inverted(PlainObserver):
    def range(self) -> tuple[Tensor, Tensor]:
        low, high = super().range()
        return high, low


class GivesNan(PlainObserver):
    def range(self) -> tuple[Tensor, Tensor]:
        low, high = super().range()
        return low, torch.where(high > low, high, torch.nan) * torch.nan


class ChangesX(PlainObserver):
    def observe(self, x: Tensor) -> None:
        super().observe(x)
        x.detach().mul_(0.5)


class KeepsReference(PlainObserver):
    tensors: tuple[Tensor, ...] = ()

    def observe(self, x: Tensor) -> None:
        self.tensors = (*self.tensors, x)

    def range(self) -> tuple[Tensor, Tensor]:
        self.low = self.high = None
        for x in self.tensors:
            super().observe(x)
        return super().range()


class Drifts(PlainObserver):
    def range(self) -> tuple[Tensor, Tensor]:
        ends = super().range()
        self.low = ends[0] * 0.9
        return ends


class Shares(PlainObserver):
    widest: dict[tuple[int, ...], Tensor] = {}

    def add(self, low: Tensor, high: Tensor) -> None:
        before = self.widest.get(tuple(high.shape), high)
        self.widest[tuple(high.shape)] = torch.maximum(before, high)
        super().add(low, self.widest[tuple(high.shape)])


class CountsObservers(PlainObserver):
    """Gives a wider range once forty of its class have been asked."""

    asked = 0

    def range(self) -> tuple[Tensor, Tensor]:
        CountsObservers.asked += 1
        low, high = super().range()
        return (low, high) if CountsObservers.asked <= 40 else (low * 1.1, high * 1.1)


class Draws(PlainObserver):
    def observe(self, x: Tensor) -> None:
        torch.rand(1)
        super().observe(x)


class IgnoresItsOption(PlainObserver):
    def range(self) -> tuple[Tensor, Tensor]:
        if self.low is None or self.high is None:
            raise CalibrationError("nothing was observed")
        return self.low, self.high


class ForgetsMerged(PlainObserver):
    def merge(self, other: Observer) -> None:
        self.of_same_kind(other)


class MergesNothingAsZero(PlainObserver):
    def merge(self, other: Observer) -> None:
        same = self.of_same_kind(other)
        if same.low is None or same.high is None:
            self.add(torch.full((), 1e3), torch.full((), 1e3))
        super().merge(other)


class RangeOfNothing(PlainObserver):
    def range(self) -> tuple[Tensor, Tensor]:
        return super().range() if self.low is not None else (torch.zeros(()), torch.zeros(()))


class CountsEmpty(PlainObserver):
    calls = 0

    def observe(self, x: Tensor) -> None:
        self.calls += 1
        super().observe(x)

    def range(self) -> tuple[Tensor, Tensor]:
        low, high = super().range()
        return low / self.calls, high / self.calls


class Average(PlainObserver):
    is_extremes = False

    def add(self, low: Tensor, high: Tensor) -> None:
        self.low = low if self.low is None else 0.9 * self.low + 0.1 * low
        self.high = high if self.high is None else 0.9 * self.high + 0.1 * high


class MeanOfTwo(PlainObserver):
    def merge(self, other: Observer) -> None:
        same = self.of_same_kind(other)
        if self.low is None or self.high is None:
            super().merge(other)
        elif same.low is not None and same.high is not None:
            self.low, self.high = (self.low + same.low) / 2, (self.high + same.high) / 2


class FirstBatch(PlainObserver):
    def observe(self, x: Tensor) -> None:
        if self.low is None:
            super().observe(x)


class FirstColumns(PlainObserver):
    def observe(self, x: Tensor) -> None:
        super().observe(x[..., :4096])


class MergesAnything(PlainObserver):
    def merge(self, other: Any) -> None:
        if getattr(other, "low", None) is not None:
            self.add(other.low, other.high)


class NearlyExtremes(PlainObserver):
    share = 0.99


class FailsForZeros(PlainObserver):
    def range(self) -> tuple[Tensor, Tensor]:
        low, high = super().range()
        return low * (high / high), high


class ReadsStorage(PlainObserver):
    def observe(self, x: Tensor) -> None:
        super().observe(x if x.is_contiguous() else x + 1)


class KeepsGraph(PlainObserver):
    def observe(self, x: Tensor) -> None:
        rows = self.granularity.rows(x.float())
        if x.numel():
            shape = self.granularity.scale_shape(tuple(x.shape))
            self.add(rows.amin(1).view(shape), rows.amax(1).view(shape))


class FarTooWide(PlainObserver):
    share = 20.0


class Empty(PlainObserver):
    share = 0.0


class RoundsHalves(PlainObserver):
    def add(self, low: Tensor, high: Tensor) -> None:
        super().add(low, high)

    def observe(self, x: Tensor) -> None:
        super().observe(x if x.dtype is torch.float32 else x * 1.1)


class HidesNan(PlainObserver):
    def observe(self, x: Tensor) -> None:
        super().observe(x.nan_to_num(0.0, torch.inf, -torch.inf))


class HidesInf(PlainObserver):
    def observe(self, x: Tensor) -> None:
        super().observe(torch.where(x.isinf(), 0.0, x))


class AcceptsAnyOption(PlainObserver):
    @classmethod
    def spec_error(cls, spec: QTensorConfig) -> str | None:
        return None


class LiesAboutDefaults(PlainObserver):
    def range(self) -> tuple[Tensor, Tensor]:
        low, high = super().range()
        return (low, high) if dict(self.spec.observer_options) else (low * 0.5, high * 0.5)


class RefusesItsDefault(PlainObserver):
    @classmethod
    def spec_error(cls, spec: QTensorConfig) -> str | None:
        return super().spec_error(spec) or ("share is below 1" if dict(spec.observer_options).get("share", 0) >= 1 else None)


class RaisesForOdd(PlainObserver):
    @classmethod
    def spec_error(cls, spec: QTensorConfig) -> str | None:
        return super().spec_error(spec) if spec.qscheme.name else None  # type: ignore[union-attr]


class AnswersTrue(PlainObserver):
    @classmethod
    def spec_error(cls, spec: QTensorConfig) -> Any:
        return spec.qscheme is None or super().spec_error(spec)


class EmptiesTheOther(PlainObserver):
    def merge(self, other: Observer) -> None:
        super().merge(other)
        self.of_same_kind(other).low = None


class SharesTensors(PlainObserver):
    """Updates its tensors in place, which another observer may have too."""

    def add(self, low: Tensor, high: Tensor) -> None:
        if self.low is None or self.high is None:
            self.low, self.high = low, high
        else:
            torch.minimum(self.low, low, out=self.low)
            torch.maximum(self.high, high, out=self.high)


class HoldsAFunction(PlainObserver):
    def __init__(self, spec: QTensorConfig, granularity: Granularity) -> None:
        super().__init__(spec, granularity)
        self.weight = lambda x: x


class OfMatrices(PlainObserver):
    def observe(self, x: Tensor) -> None:
        _rows, _columns = x.shape
        super().observe(x)


class OfTheFirstSequence(PlainObserver):
    def observe(self, x: Tensor) -> None:
        super().observe(x if x.ndim < 3 else x[0])


def record_of(observer: type[Observer]) -> ObserverRecord:
    return ObserverRecord(name="mutant_observer", class_name=observer.__name__, observer=ObjectRef(observer))


def mutant(check: str, about: str, observer: type[Observer]) -> Mutant:
    return Mutant(f"observer:{check}", about, (record_of(observer),))


HEALTHY = (record_of(PlainObserver),)
MUTANTS = (
    mutant("merging_changes_one_alone", "empties the other", EmptiesTheOther),
    mutant("merging_changes_one_alone", "has tensors of the other", SharesTensors),
    mutant("can_be_sent_to_another_process", "holds a function", HoldsAFunction),
    mutant("takes_sequences_of_tokens", "takes matrices alone", OfMatrices),
    mutant("takes_sequences_of_tokens", "looks at the first sequence alone", OfTheFirstSequence),
    mutant("serves_a_spec", "refuses every spec", ServesNothing),
    mutant("gives_float32_ranges_of_the_shape_of_the_scales", "gives float64", GivesDoubles),
    mutant("gives_float32_ranges_of_the_shape_of_the_scales", "gives one range for all groups", GivesOneRange),
    mutant("gives_float32_ranges_of_the_shape_of_the_scales", "gives Python numbers", GivesNumbers),
    mutant("gives_float32_ranges_of_the_shape_of_the_scales", "gives the ends in the wrong order", Inverted),
    mutant("gives_float32_ranges_of_the_shape_of_the_scales", "gives NaN", GivesNan),
    mutant("leaves_the_tensor_as_it_is", "halves what it observes", ChangesX),
    mutant("keeps_no_reference_to_the_tensor", "looks at the tensors when it is asked", KeepsReference),
    mutant("does_not_change_by_being_asked", "shrinks the range each time", Drifts),
    mutant("starts_afresh", "keeps the range on the class", Shares),
    mutant("gives_the_same_each_time", "counts the observers of its class", CountsObservers),
    mutant("gives_the_same_each_time", "draws from the generator of everybody", Draws),
    mutant("merges_to_what_one_observer_sees", "forgets what is merged", ForgetsMerged),
    mutant("does_not_depend_on_the_order_of_data", "averages, with more weight on the first", Average),
    mutant("merges_parts_in_any_grouping", "takes the mean of two", MeanOfTwo),
    mutant("gives_the_range_of_all_tokens_in_any_batches", "looks at the first batch alone", FirstBatch),
    mutant("looks_at_every_column", "looks at 4,096 columns", FirstColumns),
    mutant("refuses_to_merge_another_kind", "merges whatever it is given", MergesAnything),
    mutant("merging_with_an_empty_one_changes_nothing", "takes an empty observer for one of large values", MergesNothingAsZero),
    mutant("has_no_range_without_data", "gives an empty range", RangeOfNothing),
    mutant("empty_tensors_do_not_count", "counts calls", CountsEmpty),
    mutant("extremes_are_extremes", "clips a hundredth", NearlyExtremes),
    mutant("serves_hard_tensors", "divides by zero for zeros", FailsForZeros),
    mutant("does_not_depend_on_the_memory_layout", "reads strided tensors wrongly", ReadsStorage),
    mutant("works_on_an_accelerator", "gives ranges on the CPU", GivesOnTheCpu),
    mutant("keeps_no_graph", "does not detach", KeepsGraph),
    mutant("reaches_not_far_beyond_the_data", "gives twenty times the range", FarTooWide),
    mutant("reaches_some_of_the_data", "gives an empty range", Empty),
    mutant("serves_16_bit_tensors", "scales 16-bit values", RoundsHalves),
    mutant("does_not_hide_nan_or_inf", "takes NaN for 0", HidesNan),
    mutant("does_not_hide_nan_or_inf", "takes infinity for 0", HidesInf),
    mutant("refuses_unknown_options", "looks at no options", AcceptsAnyOption),
    mutant("accepts_the_defaults_of_its_options", "has another default than it says", LiesAboutDefaults),
    mutant("accepts_the_defaults_of_its_options", "refuses its default", RefusesItsDefault),
    mutant("heeds_its_options", "does nothing with its option", IgnoresItsOption),
    mutant("answers_odd_specs", "raises for a spec without qscheme", RaisesForOdd),
    mutant("answers_odd_specs", "answers True", AnswersTrue),
)
