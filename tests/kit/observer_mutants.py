"""Observers with one thing wrong each."""

from __future__ import annotations

import torch
from torch import Tensor

from quark.errors import CalibrationError
from quark.lazy import ObjectRef
from quark.plugins import ObserverRecord
from quark.quantizers import Observer

from .mutant import Mutant

__all__ = ["HEALTHY", "MUTANTS"]


class PlainObserver(Observer):
    """Smallest and largest value: the healthy observer from which the mutants differ in one thing."""

    is_extremes = True

    def __init__(self, spec: object, granularity: object) -> None:
        super().__init__(spec, granularity)  # type: ignore[arg-type]
        self.low: Tensor | None = None
        self.high: Tensor | None = None

    @classmethod
    def spec_error(cls, spec: object) -> str | None:
        return "it has no options" if getattr(spec, "observer_options", ()) else None

    def observe(self, x: Tensor) -> None:
        if x.numel():
            rows = self.granularity.rows(x.float())
            shape = self.granularity.scale_shape(tuple(x.shape))
            self.add(rows.amin(1).view(shape), rows.amax(1).view(shape))

    def add(self, low: Tensor, high: Tensor) -> None:
        self.low = low if self.low is None else torch.minimum(self.low, low)
        self.high = high if self.high is None else torch.maximum(self.high, high)

    def range(self) -> tuple[Tensor, Tensor]:
        if self.low is None or self.high is None:
            raise CalibrationError("nothing was observed")
        return self.low, self.high

    def merge(self, other: Observer) -> None:
        same = self.of_same_kind(other)
        if same.low is not None and same.high is not None:
            self.add(same.low, same.high)


class ChangesX(PlainObserver):
    def observe(self, x: Tensor) -> None:
        super().observe(x)
        x.mul_(0.5)


class ForgetsMerged(PlainObserver):
    def merge(self, other: Observer) -> None:
        self.of_same_kind(other)


def record_of(observer: type[Observer]) -> ObserverRecord:
    return ObserverRecord(name="mutant_observer", class_name=observer.__name__, observer=ObjectRef(observer))


HEALTHY = (record_of(PlainObserver),)
MUTANTS = (
    Mutant("observer:leaves_the_tensor_as_it_is", "halves what it observes", (record_of(ChangesX),)),
    Mutant("observer:merges_to_what_one_observer_sees", "forgets what is merged", (record_of(ForgetsMerged),)),
)
