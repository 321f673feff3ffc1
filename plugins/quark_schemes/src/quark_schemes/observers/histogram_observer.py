"""Base of the observers that keep a histogram and choose one range from it."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from quark.config.enums import QSchemeType
from quark.config.tensor import QTensorConfig
from quark.errors import CalibrationError
from quark.numbers import Granularity, Observer
from quark_schemes.observers.histogram import Histogram
from quark_schemes.observers.options import granularity_error, options_error

__all__ = ["HistogramObserver"]


class HistogramObserver(Observer):
    """Fills a histogram, from which subclasses choose the range; merging is exact."""

    def __init__(self, spec: QTensorConfig, granularity: Granularity) -> None:
        super().__init__(spec, granularity)
        self._histogram = Histogram()
        self._chosen: tuple[Tensor, Tensor] | None = None

    @classmethod
    def spec_error(cls, spec: QTensorConfig) -> str | None:
        if spec.qscheme is not QSchemeType.per_tensor:
            return granularity_error(cls.__name__, spec, (QSchemeType.per_tensor,))
        return options_error(cls.__name__, spec, cls.options)

    def observe(self, x: Tensor) -> None:
        self._chosen = None
        self._histogram.observe(x.detach())

    def range(self) -> tuple[Tensor, Tensor]:
        histogram = self._histogram
        if histogram.low is None or histogram.high is None:
            raise CalibrationError("nothing was observed, so there is no range: run calibration data through the layer")
        if not histogram.is_finite:
            return histogram.low.to(histogram.device), histogram.high.to(histogram.device)
        if self._chosen is None:
            # Cached, since a search is slow.
            low, high = self._choose(histogram)
            self._chosen = (_scalar(low, histogram.device), _scalar(high, histogram.device))
        return self._chosen

    def merge(self, other: Observer) -> None:
        self._histogram.merge(self.of_same_kind(other)._histogram)
        self._chosen = None

    @property
    def is_symmetric(self) -> bool:
        """Whether ranges are symmetric about 0; also true for formats without a zero point, whose specs may leave ``symmetric`` open."""
        return self.spec.symmetric is not False

    @abstractmethod
    def _choose(self, histogram: Histogram) -> tuple[Tensor | float, Tensor | float]:
        """Return low and high, one value each; called only if values were observed and all are finite."""


def _scalar(value: Tensor | float, device: torch.device) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float32, device=device).reshape(())
