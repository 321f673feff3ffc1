"""Observers that search for the range with the smallest squared error of rounding and clipping.

The search shrinks the full range. A smaller range has finer steps but clips more values. The functions take
rows ``[rows, elements]``, and find a range for each row. The rows are those of a weight, or there is one row
with the centres of histogram bins.

If a tensor has one range, the error is computed for the centres of the histogram's bins. The root mean square
of this error differs from the root mean square of the data's error by at most half the width of a bin,
because the distance to the nearest value of a format changes no faster than the value itself. If channels or
groups have ranges, the error is computed for the data.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from quark.config.enums import QSchemeType, ZeroPointType
from quark.config.tensor import QTensorConfig
from quark.errors import CalibrationError
from quark.numbers import TILE_ELEMENTS, Granularity, Observer, format_of
from quark_schemes.observers import ServingObserver
from quark_schemes.observers.histogram import Histogram, HistogramObserver

__all__ = [
    "ROW_FACTORS",
    "TENSOR_FACTORS",
    "PerChannelMSEObserver",
    "PerGroupMSEObserver",
    "PerTensorMSEObserver",
    "Range",
    "RowSearchObserver",
    "best_range",
    "error_norms",
    "has_real_zero_point",
    "shrunk_range",
]


Range = tuple[Tensor, Tensor]
"""The low ends and the high ends of ranges, each float32 ``[rows]``."""


def has_real_zero_point(spec: QTensorConfig) -> bool:
    """Return whether zero points are floating-point numbers, so that ranges need not contain 0."""
    return spec.symmetric is False and spec.zero_point_type is ZeroPointType.float32


def error_norms(values: Tensor, low: Tensor, high: Tensor, spec: QTensorConfig, weights: Tensor | None = None) -> Tensor:
    """Return √(sum of squared errors) for each row, quantized with the range of the row, float64 ``[rows]``.

    Args:
        values: The values to quantize, float32 ``[rows, elements]``.
        low, high: The ends of the ranges, float32 ``[rows]``.
        spec: The quantization.
        weights: Weight of each element in the error, float64 ``[elements]``. None means weights of 1.
    """
    number_format = format_of(spec)
    qparams = number_format.qparams(low, high, spec)
    scale = qparams.scale.float().unsqueeze(1)
    zero = None if qparams.zero_point is None else qparams.zero_point.unsqueeze(1)
    scaled = values * (1 / scale) if number_format.by_reciprocal(spec) else values / scale
    t = number_format.round_(scaled, zero)
    if zero is not None:
        t.sub_(zero)
    error = t.mul_(scale).sub_(values)
    # The squares of small errors would underflow in float32.
    weighted = error if weights is None else error * weights.sqrt()
    return torch.linalg.vector_norm(weighted, dim=1, dtype=torch.float64)


def best_range(values: Tensor, candidates: Iterable[Range], spec: QTensorConfig, weights: Tensor | None = None) -> Range:
    """Return the candidate with the smallest error for each row.

    If several candidates have the same error, the first of them is returned. Pass wide ranges first.
    """
    remaining = iter(candidates)
    low, high = next(remaining)
    least = error_norms(values, low, high, spec, weights)
    for next_low, next_high in remaining:
        error = error_norms(values, next_low, next_high, spec, weights)
        better = error < least
        least = torch.where(better, error, least)
        low, high = torch.where(better, next_low, low), torch.where(better, next_high, high)
    return low, high


def shrunk_range(
    values: Tensor, low: Tensor, high: Tensor, spec: QTensorConfig, factors: Sequence[float], weights: Tensor | None = None
) -> Range:
    """Shrink the full range of each row by each of ``factors``, and return the range with the smallest error.

    For a symmetric range, the function finds one factor. For an asymmetric range, it first finds a common
    factor for both ends, then a factor for the low end, then a factor for the high end. Ends shrink towards
    0, or towards the row's median if the range need not contain 0.

    Args:
        values: The values to quantize, float32 ``[rows, elements]``.
        low, high: The ends of the full ranges, float32 ``[rows]``.
        spec: The quantization.
        factors: Factors in descending order. The first factor is 1.
        weights: Weight of each element in the error, float64 ``[elements]``. None means weights of 1. Weights
            are allowed only with one row.
    """
    if spec.symmetric is not False:
        amax = torch.maximum(-low, high)
        return best_range(values, ((-amax * f, amax * f) for f in factors), spec, weights)
    if has_real_zero_point(spec):
        centre = _medians(values, weights)
    else:
        low, high, centre = low.clamp(max=0), high.clamp(min=0), torch.zeros_like(low)
    lows, highs = _shrunk(low, centre, factors), _shrunk(high, centre, factors)
    best_low, best_high = best_range(values, zip(lows, highs, strict=True), spec, weights)
    best_low, _ = best_range(values, ((end, best_high) for end in lows), spec, weights)
    _, best_high = best_range(values, ((best_low, end) for end in highs), spec, weights)
    return best_low, best_high


def _shrunk(end: Tensor, centre: Tensor, factors: Sequence[float]) -> list[Tensor]:
    """Return ``centre + (end − centre) · factor`` for each of ``factors``."""
    # For factor 1, return the end unchanged, since the formula could change its last bit.
    return [end if factor == 1 else centre + (end - centre) * factor for factor in factors]


def _medians(values: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        return values.median(dim=1).values
    until = weights.cumsum(0)
    return values[:, torch.searchsorted(until, until[-1:] / 2).clamp_(max=values.shape[1] - 1)].squeeze(1)


class RowSearchObserver(ServingObserver):
    """Base of the observers that find the range of each row as soon as they observe a tensor.

    The observer does not store the tensor, so it can observe only one tensor.

    With a histogram for each row, the observer could observe several tensors, but the histograms would be
    larger than the weight. The observer supports dynamic activations, because each activation gets a new
    observer. Two observers can be merged if at most one of them has observed a tensor.
    """

    def __init__(self, spec: QTensorConfig, granularity: Granularity | torch.device | str | None = None) -> None:
        super().__init__(spec, granularity)
        self._range: Range | None = None

    def observe(self, x: Tensor) -> None:
        """Find the ranges of the tensor ``x``.

        Raises:
            CalibrationError: The observer has already observed a tensor.
        """
        if x.numel() == 0:
            return
        if self._range is not None:
            raise self._seen_twice()
        shape = self.granularity.scale_shape(tuple(x.shape))
        rows = self.granularity.rows(x.detach())
        low, high = (torch.empty(rows.shape[0], dtype=torch.float32, device=rows.device) for _ in range(2))
        step = max(1, TILE_ELEMENTS // rows.shape[1])
        for top in range(0, rows.shape[0], step):
            part = slice(top, top + step)
            tile = rows[part].float()
            low[part], high[part] = self._search(tile, torch.amin(tile, dim=1), torch.amax(tile, dim=1))
        self._range = low.reshape(shape), high.reshape(shape)

    def range(self) -> tuple[Tensor, Tensor]:
        if self._range is None:
            raise self.nothing_observed()
        return self._range

    def merge(self, other: Observer) -> None:
        """If ``other`` has observed a tensor, use the ranges of ``other``.

        Raises:
            CalibrationError: Both observers have observed a tensor.
        """
        ranges = self.of_same_kind(other)._range
        if self._range is not None and ranges is not None:
            raise self._seen_twice()
        self._range = self._range or ranges

    def _seen_twice(self) -> CalibrationError:
        return CalibrationError(
            f"{type(self).__name__} got a second tensor, but this observer is for weights: for static activations, use a min-max "
            f"observer or PerTensorMSEObserver"
        )

    @abstractmethod
    def _search(self, rows: Tensor, low: Tensor, high: Tensor) -> Range:
        """Return the low end and the high end of the range for each of ``rows``, float32 ``[rows]``.

        ``low`` and ``high`` are the smallest and the largest value of each row. If one of these is NaN or
        Inf, the method returns it as the end of the range.
        """


_STEPS_TO_HALF = 16
"""Number of candidates per halving of the range. Neighbouring candidates differ by 4 %."""
TENSOR_FACTORS = tuple(2 ** (-i / _STEPS_TO_HALF) for i in range(10 * _STEPS_TO_HALF + 1))
"""Factors for the range of a tensor: 16 steps per halving, and ten halvings.

So many are needed because activations can have outliers that are 1000 times as large as the other values.
"""
ROW_FACTORS = TENSOR_FACTORS[: 3 * _STEPS_TO_HALF + 1]
"""Factors for the range of a channel or group of a weight, from 1 to an eighth."""


class PerTensorMSEObserver(HistogramObserver):
    """Finds the range of a tensor that gives the smallest squared error in the format of the spec.

    `shrunk_range` describes the candidates.
    """

    def _choose(self, histogram: Histogram) -> tuple[Tensor | float, Tensor | float]:
        values = histogram.distribution()
        return shrunk_range(values.row, *values.full_range(), self.spec, TENSOR_FACTORS, values.weights)


class _RowMSEObserver(RowSearchObserver):
    def _search(self, rows: Tensor, low: Tensor, high: Tensor) -> Range:
        return shrunk_range(rows, low, high, self.spec, ROW_FACTORS)


class PerChannelMSEObserver(_RowMSEObserver):
    """Finds, for each channel of a weight, the range that gives the smallest squared error."""

    qschemes = (QSchemeType.per_channel,)


class PerGroupMSEObserver(_RowMSEObserver):
    """Finds, for each group of a weight, the range that gives the smallest squared error."""

    qschemes = (QSchemeType.per_group,)
