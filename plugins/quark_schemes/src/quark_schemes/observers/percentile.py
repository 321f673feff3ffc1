"""The percentile observer, whose range leaves out a share of the values."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from quark.config.tensor import QTensorConfig
from quark_schemes.observers.histogram import Histogram, HistogramObserver

__all__ = ["PerTensorPercentileObserver"]


class PerTensorPercentileObserver(HistogramObserver):
    """Computes one range per tensor from percentiles of the values.

    A symmetric range is ``(-t, t)``, with the percentile ``t`` of the magnitudes. An asymmetric range goes
    from the percentile ``100 - percentile`` of the values to the percentile ``percentile``, so values may be
    clipped on both sides. Zeros count like other values. The option ``percentile`` has the same default as in
    AMD Quark, and this percentile is close to the largest value.

    Attributes:
        percentile: A number above 0 and at most 100. For asymmetric ranges, it must be at least 50.
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
