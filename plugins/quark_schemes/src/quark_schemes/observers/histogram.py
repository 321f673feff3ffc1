"""Histograms that can be merged exactly, and the base class of the observers that use a histogram.

A histogram has ``BINS`` bins on either side of 0, and a separate bin for zeros. The width of a bin is ``2^k /
BINS``, and ``2^k`` is the smallest power of two above every observed magnitude. When ``k`` increases by 1,
pairs of neighbouring bins are joined to one bin, so that no bin is split. The counts therefore depend only on
the data, not on the order of the data or on the batches. Merging two histograms gives exactly the same counts
as filling one histogram with both data sets.
"""

from __future__ import annotations

import math
from abc import abstractmethod

import attrs
import torch
from torch import Tensor

from quark.config.enums import QSchemeType
from quark.config.tensor import QTensorConfig
from quark.numbers import TILE_ELEMENTS, Granularity, Observer
from quark_schemes.observers import ServingObserver

__all__ = ["BINS", "Distribution", "Histogram", "HistogramObserver"]


BINS = 1 << 13
"""Number of bins on either side of 0, a power of two.

The largest magnitude is in the upper half of the bins of a side, so the width of a bin is at most 1/4096 of
the largest magnitude.
"""

_LOG_BINS = BINS.bit_length() - 1
_SMALLEST_EXPONENT = -100  # a smaller exponent would overflow the factor from values to bins; smaller values share the bins next to 0


@attrs.frozen(eq=False)
class Distribution:
    """The non-empty bins of a histogram, in ascending order.

    The first bin begins at the smallest value, and the last bin ends at the largest value.

    Attributes:
        left, right: Edges of the bins, float64 ``[bins]``. The bin of zeros has width 0.
        counts: Number of values in each bin, int64 ``[bins]``.
        low, high: Smallest and largest value. In a distribution of magnitudes, ``low`` may be smaller than
            the smallest magnitude: it is the left edge of the first bin if there are values on both sides of
            0.
    """

    left: Tensor
    right: Tensor
    counts: Tensor
    low: float
    high: float

    @property
    def centres(self) -> Tensor:
        """The centres of the bins, float64 ``[bins]``."""
        return (self.left + self.right) / 2

    @property
    def row(self) -> Tensor:
        """The centres of the bins as one row of a matrix, float32 ``[1, bins]``."""
        return self.centres.float().unsqueeze(0)

    @property
    def weights(self) -> Tensor:
        """The counts of the bins as float64 ``[bins]``. They are the weights of the values in `row`."""
        return self.counts.double()

    def full_range(self) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest value, each as float32 ``[1]``."""
        low, high = torch.tensor([[self.low], [self.high]], dtype=torch.float32, device=self.counts.device)
        return low, high

    def quantile(self, fraction: float) -> float:
        """Return the quantile at ``fraction``, a number from 0 to 1.

        The quantile is interpolated between two neighbouring values, as in ``torch.quantile``. The values
        themselves are interpolated within bins, so the result differs from torch's by at most the width of a
        bin.
        """
        rank = fraction * (int(self.counts.sum()) - 1)
        below = math.floor(rank)
        return self._ranked(below) * (1 - (rank - below)) + self._ranked(math.ceil(rank)) * (rank - below)

    def _ranked(self, rank: int) -> float:
        """Return the value that would be at index ``rank`` if all values were sorted in ascending order."""
        until = self.counts.cumsum(0)
        if rank in (0, int(until[-1]) - 1):
            return self.high if rank else self.low
        index = int(torch.searchsorted(until, rank, right=True))
        count = int(self.counts[index])
        within = (rank - (int(until[index]) - count) + 0.5) / count
        left, right = float(self.left[index]), float(self.right[index])
        return left + (right - left) * within


class Histogram:
    """The counts of values in bins, and the exact smallest and largest value.

    Attributes:
        low, high: Smallest and largest value, float32 ``[]`` on the CPU; None before the first value. If a
            tensor has NaN or Inf, ``low`` or ``high`` becomes NaN or Inf, and the values of the tensor are
            not counted.
    """

    def __init__(self) -> None:
        self.low: Tensor | None = None
        self.high: Tensor | None = None
        self._exponent = _SMALLEST_EXPONENT
        self._counts: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """The device of the counts and of the observed data."""
        return torch.device("cpu") if self._counts is None else self._counts.device

    @property
    def is_finite(self) -> bool:
        """Whether values were observed and all of them were finite."""
        return self.low is not None and self.high is not None and bool(torch.isfinite(self.low) & torch.isfinite(self.high))

    def observe(self, x: Tensor) -> None:
        """Count the values of a tensor of any float dtype and shape."""
        if x.numel() == 0:
            return
        low, high = (bound.float().cpu() for bound in torch.aminmax(x))
        self._widen(low, high)
        if not (torch.isfinite(low) & torch.isfinite(high)):
            return
        counts = self._grown(_exponent_above(max(-float(low), float(high))), x.device)
        bins_per_unit = math.ldexp(1.0, _LOG_BINS - self._exponent)
        values = x.reshape(-1)
        for start in range(0, values.numel(), TILE_ELEMENTS):
            tile = values[start : start + TILE_ELEMENTS].float()
            # The conversion truncates towards 0, so that a bin includes its edge nearer to 0. Adding the sign
            # reserves index 0 for zeros.
            index = (tile * bins_per_unit).to(torch.int32).add_(tile.sign().to(torch.int32)).add_(BINS)
            counts += torch.bincount(index, minlength=2 * BINS + 1)

    def merge(self, other: Histogram) -> None:
        """Add the counts of another histogram."""
        if other.low is None or other.high is None:
            return
        self._widen(other.low, other.high)
        if other._counts is not None:
            counts = self._grown(other._exponent, other._counts.device)
            counts += _rebinned(other._counts, self._exponent - other._exponent).to(counts.device)

    def distribution(self, *, magnitudes: bool = False) -> Distribution:
        """Return the distribution of the observed values, or of the magnitudes of the values.

        This requires that `is_finite` is true.
        """
        assert self.low is not None
        assert self.high is not None
        assert self._counts is not None
        low, high = float(self.low), float(self.high)
        counts, first = self._counts, -BINS
        if magnitudes:
            counts, first = counts[BINS:].clone(), 0
            counts[1:] += self._counts[:BINS].flip(0)
            low, high = max(low, -high, 0.0), max(-low, high)
        place = counts.nonzero().squeeze(1)
        width = math.ldexp(1.0, self._exponent - _LOG_BINS)
        # With the bin width w, bin 3 contains [2w, 3w), bin -3 contains (-3w, -2w], and bin 0 contains the
        # zeros.
        outer = (place + first).double() * width
        left = torch.where(outer > 0, outer - width, outer).clamp(low, high)
        right = torch.where(outer < 0, outer + width, outer).clamp(low, high)
        return Distribution(left, right, counts[place], float(left[0]), high)

    def _widen(self, low: Tensor, high: Tensor) -> None:
        self.low = low if self.low is None else torch.minimum(self.low, low)
        self.high = high if self.high is None else torch.maximum(self.high, high)

    def _grown(self, exponent: int, device: torch.device) -> Tensor:
        """Widen the bins until they cover all magnitudes below ``2^exponent``, and return the counts.

        The caller adds new counts to the returned tensor in place.
        """
        if self._counts is None:
            self._counts = torch.zeros(2 * BINS + 1, dtype=torch.int64, device=device)
        if exponent > self._exponent:
            self._counts = _rebinned(self._counts, exponent - self._exponent)
            self._exponent = exponent
        return self._counts


def _exponent_above(magnitude: float) -> int:
    """Return the smallest integer ``k`` with ``magnitude < 2^k``, but at least `_SMALLEST_EXPONENT`."""
    return max(math.frexp(magnitude)[1], _SMALLEST_EXPONENT) if magnitude else _SMALLEST_EXPONENT


def _rebinned(counts: Tensor, doublings: int) -> Tensor:
    """Return the counts in bins that are ``2^doublings`` times as wide."""
    if doublings == 0:
        return counts
    offset = torch.arange(-BINS, BINS + 1, device=counts.device)
    # Shifts beyond the bins of a side have no further effect, and shifts by 64 or more are undefined.
    index = offset.sign() * ((offset.abs().sub_(1) >> min(doublings, _LOG_BINS)) + 1)
    return torch.zeros_like(counts).index_add_(0, index + BINS, counts)


class HistogramObserver(ServingObserver):
    """Base of the observers that fill a histogram and choose the range from the histogram.

    If two observers are merged, the result is the same as if one observer had observed all data.
    """

    qschemes = (QSchemeType.per_tensor,)

    def __init__(self, spec: QTensorConfig, granularity: Granularity | torch.device | str | None = None) -> None:
        super().__init__(spec, granularity)
        self._histogram = Histogram()
        self._chosen: tuple[Tensor, Tensor] | None = None

    def observe(self, x: Tensor) -> None:
        self._chosen = None
        self._histogram.observe(x.detach())

    def range(self) -> tuple[Tensor, Tensor]:
        histogram = self._histogram
        if histogram.low is None or histogram.high is None:
            raise self.nothing_observed()
        if not histogram.is_finite:
            return histogram.low.to(histogram.device), histogram.high.to(histogram.device)
        if self._chosen is None:
            # The range is cached, since the search is slow.
            low, high = self._choose(histogram)
            self._chosen = (_scalar(low, histogram.device), _scalar(high, histogram.device))
        return self._chosen

    def merge(self, other: Observer) -> None:
        self._histogram.merge(self.of_same_kind(other)._histogram)
        self._chosen = None

    @property
    def is_symmetric(self) -> bool:
        """Whether the range is symmetric about 0.

        This is also true for formats without a zero point, even if ``symmetric`` is None in the spec.
        """
        return self.spec.symmetric is not False

    @abstractmethod
    def _choose(self, histogram: Histogram) -> tuple[Tensor | float, Tensor | float]:
        """Return the low end and the high end of the range that this class chooses from a histogram.

        This method is called only if the histogram has values and all of them are finite.
        """


def _scalar(value: Tensor | float, device: torch.device) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float32, device=device).reshape(())
