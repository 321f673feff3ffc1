"""Observers for scales that are powers of two, with every scale type.

The observers choose ranges for which the scale is exactly a power of two.

The min-max scale is the scale for the range from the smallest to the largest value. The min-max observers use
the power of two nearest to the min-max scale, as in AMD Quark. This power may be smaller, so that values are
clipped. The min-MSE observers also try the next two larger and the next two smaller powers of two. Source:
the choice of exponents in AMD Quark 0.13, by observers of the same names.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quark.base.scalars import divided
from quark.config.enums import QSchemeType
from quark.config.tensor import QTensorConfig
from quark.numbers import format_of
from quark_schemes.arithmetic.shared_exponent import power_of_two
from quark_schemes.observers import ServingObserver
from quark_schemes.observers.histogram import Histogram, HistogramObserver
from quark_schemes.observers.min_max import MinMaxObserver
from quark_schemes.observers.mse import Range, RowSearchObserver, best_range, has_real_zero_point
from quark_schemes.scale_formats import smallest_scale

__all__ = [
    "PerChannelPowOf2MinMSEObserver",
    "PerChannelPowOf2MinMaxObserver",
    "PerTensorPowOf2MinMSEObserver",
    "PerTensorPowOf2MinMaxObserver",
]

_OFFSETS = (2, 1, 0, -1, -2)  # wide ranges come first: if ranges are equally good, the widest is used
_LARGEST = float(torch.finfo(torch.float32).max)


class _PowOf2Observer(ServingObserver):
    """Base of these observers. It refuses specs with which no range gives a power of two as the scale.

    Attributes:
        centred: Whether the zero point is always the middle code. AMD Quark does this for symmetric specs of
            unsigned formats.
    """

    centred = False
    options = ("centred",)

    @classmethod
    def spec_error(cls, spec: QTensorConfig) -> str | None:
        if (error := super().spec_error(spec)) is not None:
            return error
        if has_real_zero_point(spec):
            return f"{cls.__name__} needs integer zero points: set zero_point_type=ZeroPointType.int32"
        if spec.scale_format == "e8m0":
            return f"{cls.__name__} does not support scales that are powers of two already: use a min-max observer with scale_format='e8m0'"
        return None


class _Powers:
    """Computes ranges whose scales are powers of two near the min-max scale.

    The tensors ``low`` and ``high`` may have any shape.

    An asymmetric range has the same zero point as the range from ``low`` to ``high``, so both ends change by
    the same factor.
    """

    def __init__(self, low: Tensor, high: Tensor, spec: QTensorConfig) -> None:
        low, high = low.clamp(max=0).double(), high.clamp(min=0).double()
        max_magnitude = format_of(spec).max_magnitude(spec)
        smallest = smallest_scale(max_magnitude)
        if spec.symmetric is not False:
            self._below = self._above = torch.full_like(low, max_magnitude).float()
            scale = divided(torch.maximum(-low, high), max_magnitude).clamp_(min=smallest)
        else:
            is_centred = dict(spec.observer_options).get("centred", False)
            span = 2 * torch.maximum(-low, high) if is_centred else high - low
            scale = divided(span, 2 * max_magnitude).clamp_(min=smallest)
            middle = torch.full_like(low, math.ceil(max_magnitude))
            self._below = (middle if is_centred else (-low / scale).round_()).float()
            self._above = 2 * max_magnitude - self._below
        self._smallest = math.frexp(smallest)[1] - 1
        self._nearest = scale.log2().round_()
        self._largest = math.floor(math.log2(_LARGEST / math.ceil(2 * max_magnitude)))  # both ends and their distance are finite

    def range(self, offset: int) -> Range:
        """Return the float32 range whose scale is exactly ``2^(n + offset)``.

        ``2^n`` is the power of two nearest to the min-max scale.
        """
        exponent = (self._nearest + offset).clamp_(self._smallest, self._largest)
        scale = power_of_two(exponent.to(torch.int32))
        return -self._below * scale, self._above * scale


def _where_finite(best: Range, low: Tensor, high: Tensor) -> Range:
    """Return the ranges ``best``, but ``low`` and ``high`` in rows in which one of these is not finite."""
    finite = torch.isfinite(low) & torch.isfinite(high)
    return torch.where(finite, best[0], low), torch.where(finite, best[1], high)


class _PowOf2MinMaxObserver(_PowOf2Observer, MinMaxObserver):
    is_extremes = False

    def range(self) -> tuple[Tensor, Tensor]:
        low, high = super().range()
        return _where_finite(_Powers(low, high, self.spec).range(0), low, high)


class PerTensorPowOf2MinMaxObserver(_PowOf2MinMaxObserver):
    """Chooses the range of a tensor with which the scale is the power of two nearest to the min-max scale."""

    qschemes = (QSchemeType.per_tensor,)


class PerChannelPowOf2MinMaxObserver(_PowOf2MinMaxObserver):
    """Chooses each channel's range with which the scale is the power of two nearest to the min-max scale."""

    qschemes = (QSchemeType.per_channel,)


def _of_least_error(values: Tensor, low: Tensor, high: Tensor, spec: QTensorConfig, weights: Tensor | None = None) -> Range:
    powers = _Powers(low, high, spec)
    return best_range(values, (powers.range(offset) for offset in _OFFSETS), spec, weights)


class PerTensorPowOf2MinMSEObserver(_PowOf2Observer, HistogramObserver):
    """Chooses the range of a tensor by the squared error.

    A candidate is a range whose scale is one of the five powers of two nearest to the min-max scale.
    """

    def _choose(self, histogram: Histogram) -> tuple[Tensor | float, Tensor | float]:
        values = histogram.distribution()
        return _of_least_error(values.row, *values.full_range(), self.spec, values.weights)


class PerChannelPowOf2MinMSEObserver(_PowOf2Observer, RowSearchObserver):
    """Chooses the range of each channel of a weight by the squared error.

    A candidate is a range whose scale is one of the five powers of two nearest to the min-max scale.
    """

    qschemes = (QSchemeType.per_channel,)

    def _search(self, rows: Tensor, low: Tensor, high: Tensor) -> Range:
        return _where_finite(_of_least_error(rows, low, high, self.spec), low, high)
