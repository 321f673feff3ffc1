"""Search for the range with the smallest squared error of rounding and clipping.

All functions work on rows ``[rows, elements]`` with one range per row: the rows of a weight, or one row of
histogram bins with counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from quark.config.enums import ZeroPointType
from quark.config.tensor import QTensorConfig
from quark.numbers import format_of

__all__ = ["Range", "best_range", "error_norms", "has_real_zero_point", "shrunk_range"]

Range = tuple[Tensor, Tensor]
"""Low and high, float32 ``[rows]``."""


def has_real_zero_point(spec: QTensorConfig) -> bool:
    """Return whether zero points are real numbers, so that ranges need not contain 0."""
    return spec.symmetric is False and spec.zero_point_type is ZeroPointType.float32


def error_norms(values: Tensor, low: Tensor, high: Tensor, spec: QTensorConfig, weights: Tensor | None = None) -> Tensor:
    """Return the root of the summed squared error of quantizing each row with its range, float64 ``[rows]``.

    Args:
        values: Float32 ``[rows, elements]``.
        low, high: Ranges, float32 ``[rows]``.
        spec: The quantization.
        weights: Weight of each element in the error, float64 ``[elements]``; None for 1.
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
    """Return the candidate with the smallest error for each row; the first of equals, so pass wide ranges first."""
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
    """Return the range with the smallest error among the full range shrunk by ``factors``.

    Symmetric ranges have one factor. For asymmetric ranges, a common factor of both ends is searched first,
    then a factor of the low end, then one of the high end. Ends shrink towards 0, or, if the range need not
    contain 0, towards the row's median.

    Args:
        values: Float32 ``[rows, elements]``.
        low, high: The rows' full ranges, float32 ``[rows]``.
        spec: The quantization.
        factors: Descending from 1.
        weights: Weight of each element in the error, float64 ``[elements]``, only with one row; None for 1.
    """
    if spec.symmetric is not False:
        amax = torch.maximum(-low, high)
        return best_range(values, ((-amax * f, amax * f) for f in factors), spec, weights)
    if has_real_zero_point(spec):
        centre = _medians(values, weights)
    else:
        low, high, centre = low.clamp(max=0), high.clamp(min=0), torch.zeros_like(low)
    lows, highs = _Shrunk(low, centre, factors), _Shrunk(high, centre, factors)
    best_low, best_high = best_range(values, zip(lows, highs, strict=True), spec, weights)
    best_low, _ = best_range(values, ((end, best_high) for end in lows), spec, weights)
    _, best_high = best_range(values, ((best_low, end) for end in highs), spec, weights)
    return best_low, best_high


class _Shrunk:
    """Iterates one end of the range shrunk by each factor; can be iterated more than once."""

    def __init__(self, end: Tensor, centre: Tensor, factors: Sequence[float]) -> None:
        self.end, self.centre, self.factors = end, centre, factors

    def __iter__(self) -> Iterator[Tensor]:
        # Factor 1 returns the full range unchanged, since the formula could change its last bit.
        return (self.end if f == 1 else self.centre + (self.end - self.centre) * f for f in self.factors)


def _medians(values: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        return values.median(dim=1).values
    until = weights.cumsum(0)
    return values[:, torch.searchsorted(until, until[-1:] / 2).clamp_(max=values.shape[1] - 1)].squeeze(1)
