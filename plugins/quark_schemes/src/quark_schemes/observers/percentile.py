"""The percentile observer: a range that leaves out a share of the values."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from quark.config.tensor import QTensorConfig
from quark_schemes.observers.histogram import Histogram, HistogramObserver

__all__ = ["PerTensorPercentileObserver"]


class PerTensorPercentileObserver(HistogramObserver):
    """One range per tensor, from percentiles of the values.

    A symmetric range is ``(-t, t)``; ``t`` is the percentile ``percentile`` of the magnitudes. An asymmetric
    range goes from the percentile ``100 - percentile`` of the values to the percentile ``percentile``, so
    both sides may be clipped. Zeros are values like any other. The default of the option ``percentile`` is
    AMD Quark's; that percentile is close to the largest value.

    Attributes:
        percentile: Percentile above 0 and up to 100; at least 50 for asymmetric ranges.
    """

    options = ("percentile",)
    percentile: ClassVar[float] = 99.99999999

    @classmethod
    def spec_error(cls, spec: QTensorConfig) -> str | None:
        value = dict(spec.observer_options).get("percentile", cls.percentile)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 100:
            return f"{cls.__name__} cannot use percentile={value!r}: give a number above 0 and up to 100, such as 99.9"
        if spec.symmetric is False and value < 50:
            return f"{cls.__name__} cannot use percentile={value!r} for an asymmetric range, since its ends would cross: give 50 to 100"
        return super().spec_error(spec)

    def _choose(self, histogram: Histogram) -> tuple[Tensor | float, Tensor | float]:
        share = float(dict(self.spec.observer_options).get("percentile", self.percentile)) / 100
        if self.is_symmetric:
            threshold = histogram.distribution(magnitudes=True).quantile(share)
            return -threshold, threshold
        values = histogram.distribution()
        return values.quantile(1 - share), values.quantile(share)
