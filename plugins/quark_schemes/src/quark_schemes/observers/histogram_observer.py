"""Base of the observers that keep a histogram and choose one range from it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from typing import ClassVar

import torch
from torch import Tensor

from quark.config.enums import QSchemeType
from quark.config.tensor import QTensorConfig
from quark.errors import CalibrationError
from quark.quantizers import Granularity, Observer
from quark_schemes.observers.histogram import Histogram

__all__ = ["HistogramObserver", "options_error"]


def options_error(observer: str, spec: QTensorConfig, known: Collection[str] = ()) -> str | None:
    """Why an observer with the options ``known`` cannot use those of the spec, and the fix; None where it can."""
    unknown = [name for name, _ in spec.observer_options if name not in known]
    if not unknown:
        return None
    fix = f"its options are {', '.join(known)}" if known else "it has none, leave observer_options out"
    return f"{observer} has no option {', '.join(map(repr, unknown))}: {fix}"


class HistogramObserver(Observer):
    """Fills a histogram; subclasses choose the range. Merging is exact."""

    options: ClassVar[tuple[str, ...]] = ()

    def __init__(self, spec: QTensorConfig, granularity: Granularity) -> None:
        super().__init__(spec, granularity)
        self._histogram = Histogram()
        self._chosen: tuple[Tensor, Tensor] | None = None

    @classmethod
    def spec_error(cls, spec: QTensorConfig) -> str | None:
        if spec.qscheme is not QSchemeType.per_tensor:
            return f"{cls.__name__} serves per_tensor, not {spec.qscheme and spec.qscheme.name}: use the observer of that granularity"
        return options_error(cls.__name__, spec, cls.options)

    def observe(self, x: Tensor) -> None:
        self._chosen = None
        self._histogram.observe(x.detach())

    def range(self) -> tuple[Tensor, Tensor]:
        seen = self._histogram
        if seen.low is None or seen.high is None:
            raise CalibrationError("nothing was observed, so there is no range: run calibration data through the layer")
        if not seen.is_finite:
            return seen.low.to(seen.device), seen.high.to(seen.device)
        if self._chosen is None:
            # Cached: a search takes long.
            low, high = self._choose(seen)
            self._chosen = (_scalar(low, seen.device), _scalar(high, seen.device))
        return self._chosen

    def merge(self, other: Observer) -> None:
        self._histogram.merge(self.of_same_kind(other)._histogram)
        self._chosen = None

    @property
    def is_symmetric(self) -> bool:
        """Whether ranges lie evenly about 0: formats without a zero point need not say so."""
        return self.spec.symmetric is not False

    @abstractmethod
    def _choose(self, seen: Histogram) -> tuple[Tensor | float, Tensor | float]:
        """Low and high, one value each. Called only if values were observed, all of them finite."""


def _scalar(value: Tensor | float, device: torch.device) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float32, device=device).reshape(())
