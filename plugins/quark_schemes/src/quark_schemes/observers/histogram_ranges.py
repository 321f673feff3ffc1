"""Histogram observers that choose the range with the smallest expected squared error.

A range may clip values at both ends. The ends of a range are edges of bins.

As in PyTorch's ``HistogramObserver``, the error of a clipped value is the distance between the value and the
range. The error of any other value is the rounding error.
"""

from __future__ import annotations

import math

import attrs
import torch
from torch import Tensor

from quark.config.tensor import QTensorConfig
from quark.numbers import format_of
from quark_schemes.formats.integer import IntegerFormat
from quark_schemes.observers.histogram import Distribution, Histogram, HistogramObserver
from quark_schemes.observers.mse import best_range, has_real_zero_point

__all__ = ["CLIPPED_SHARES", "ExpectedError", "PerTensorHistogramObserver", "PerTensorHistogramObserverPro"]

CLIPPED_SHARES = (0.0, *(2.0 ** (-i / 4) for i in range(80, 11, -1)))
"""Shares of the values that may be clipped.

The first share is 0. The others go from a millionth to an eighth, with four steps per doubling.
"""


_COARSE = 256
"""Number of starts, and number of ends, in the first round of `_least`. That round compares all pairs."""


class PerTensorHistogramObserver(HistogramObserver):
    """Chooses one range per tensor, from one candidate for each share in `CLIPPED_SHARES`.

    The candidate for a share is the narrowest range between bin edges that clips at most this share of the
    values. The observer chooses the candidate with the smallest squared error in the number format of the
    spec. If ranges are symmetric, the values with the largest magnitudes are clipped.
    """

    def _choose(self, histogram: Histogram) -> tuple[Tensor | float, Tensor | float]:
        values = histogram.distribution()
        lows, highs = self._narrowest(histogram)
        candidates = zip(lows.float().split(1), highs.float().split(1), strict=True)
        return best_range(values.row, candidates, self.spec, values.weights)

    def _narrowest(self, histogram: Histogram) -> tuple[Tensor, Tensor]:
        """Return the low ends and the high ends of the narrowest ranges, each as float64 ``[shares]``."""
        values = histogram.distribution(magnitudes=self.is_symmetric)
        until = values.counts.cumsum(0)
        total = int(until[-1])
        inside = torch.tensor([total - math.floor(share * total) for share in CLIPPED_SHARES], device=until.device)
        if self.is_symmetric:
            threshold = values.right[torch.searchsorted(until, inside)]
            return -threshold, threshold
        # For each start, the end is the first bin with which the range contains enough values. Late starts
        # have no such bin.
        end = torch.searchsorted(until, (until - values.counts) + inside.unsqueeze(1))
        width = torch.cat([values.right, values.right.new_full((1,), torch.inf)])[end] - values.left
        start = width.argmin(dim=1)
        return values.left[start], values.right[end.gather(1, start.unsqueeze(1)).squeeze(1)]


class PerTensorHistogramObserverPro(HistogramObserver):
    """Chooses one range per tensor: the two bin edges with the smallest expected squared error.

    The observer supports only integers, because their steps are uniform.

    The error of a clipped value is the squared distance between the value and the range. The error of any
    other value is ``step² / 12``, but zeros have no error if the format represents 0. The observer compares
    pairs of edges in two rounds: first, all pairs of 256 low ends and 256 high ends, then all pairs near the
    best of these pairs.
    """

    @classmethod
    def spec_error(cls, spec: QTensorConfig) -> str | None:
        if not isinstance(format_of(spec), IntegerFormat):
            return f"{cls.__name__} supports integers, not {spec.dtype.name}: use PerTensorHistogramObserver or PerTensorMSEObserver"
        return super().spec_error(spec)

    def _choose(self, histogram: Histogram) -> tuple[Tensor | float, Tensor | float]:
        values = histogram.distribution(magnitudes=self.is_symmetric)
        steps = 2 * format_of(self.spec).max_magnitude(self.spec)
        if not has_real_zero_point(self.spec):
            rounded = values.centres != 0
            values = attrs.evolve(values, left=values.left[rounded], right=values.right[rounded], counts=values.counts[rounded])
        if self.is_symmetric:
            cost = ExpectedError(values, steps / 2)
            zero = values.right.new_zeros(1)
            _, threshold = _least(cost, zero, torch.cat([values.right.flip(0), zero]))
            return -threshold, threshold
        starts, ends = values.left, values.right.flip(0)
        if not has_real_zero_point(self.spec):
            zero = starts.new_zeros(1)
            starts, ends = torch.cat([starts[starts < 0], zero]), torch.cat([ends[ends > 0], zero])
        return _least(ExpectedError(values, steps), starts, ends)


class ExpectedError:
    """Computes the expected squared error of quantizing a distribution, for many ranges at once.

    Args:
        values: The distribution. If the format represents 0, the distribution must not contain zeros, because
            zeros have no error.
        steps: Number of quantization steps in a range.
    """

    def __init__(self, values: Distribution, steps: float) -> None:
        self._centres, self._steps = values.centres, steps
        counts = values.counts.double()
        moments = torch.stack([counts, counts * self._centres, counts * self._centres.square()])
        # Column i sums the first i bins.
        self._below = torch.nn.functional.pad(moments.cumsum(1), (1, 0))

    def __call__(self, starts: Tensor, ends: Tensor) -> Tensor:
        """Return the error of the range between each start and each end, float64 ``[starts, ends]``.

        The error is infinite if start > end.
        """
        starts, ends = starts.contiguous(), ends.contiguous()
        under = self._below[:, torch.searchsorted(self._centres, starts)]
        over = self._below[:, -1:] - self._below[:, torch.searchsorted(self._centres, ends, right=True)]
        inside = self._below[0, -1] - under[0].unsqueeze(1) - over[0]
        step = (ends - starts.unsqueeze(1)) / self._steps
        cost = _clipping_error(under, starts).unsqueeze(1) + _clipping_error(over, ends) + inside * step.square() / 12
        return torch.where(step >= 0, cost, torch.inf)


def _clipping_error(moments: Tensor, end: Tensor) -> Tensor:
    """Return the sum of ``(value − end)²`` over the values that are clipped to ``end``.

    ``moments`` are the number of these values, their sum, and the sum of their squares.
    """
    number, total, squares = moments
    return (squares - 2 * end * total + end.square() * number).clamp_(min=0)


def _least(cost: ExpectedError, starts: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return the start and the end of the range with the smallest error.

    ``starts`` and ``ends`` are sorted from the widest range to the narrowest. If there are many, the function
    searches in two rounds.
    """
    strides = [max(1, -(-len(edges) // _COARSE)) for edges in (starts, ends)]
    coarse = cost(starts[:: strides[0]], ends[:: strides[1]])
    row, column = divmod(int(coarse.argmin()), coarse.shape[1])
    starts, ends = _around(starts, row * strides[0], strides[0]), _around(ends, column * strides[1], strides[1])
    fine = cost(starts, ends)
    row, column = divmod(int(fine.argmin()), fine.shape[1])
    return starts[row], ends[column]


def _around(edges: Tensor, index: int, stride: int) -> Tensor:
    return edges[max(0, index - stride) : index + stride + 1]
