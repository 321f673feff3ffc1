"""Statistics over predictions that lie in windows: means with standard errors, percentiles."""

from __future__ import annotations

import math

import attrs
import torch
from torch import Tensor

__all__ = ["Mean", "mean_over", "percentile"]


@attrs.frozen
class Mean:
    """A mean and its standard error.

    Attributes:
        value: The mean over predictions.
        error: Its standard error; None where there is only one window.
    """

    value: float
    error: float | None

    def exp(self) -> Mean:
        """Return the exponential of the mean, with the error that follows to first order; infinity where it overflows."""
        try:
            value = math.exp(self.value)
        except OverflowError:
            return Mean(math.inf, None)
        return Mean(value, None if self.error is None else value * self.error)


def mean_over(values: Tensor, window: Tensor) -> Mean:
    """Return the mean of values and its standard error, for values that depend on each other within a window and not between windows.

    Tokens of one window are alike, so that an error that takes them for independent is too small. Source:
    cluster-robust standard errors, Liang and Zeger 1986, with the correction W / (W − 1) for W windows.

    Args:
        values: ``[N]``, float64.
        window: ``[N]``, int64: the window that each belongs to.
    """
    mean = values.mean()
    _, index = window.unique(return_inverse=True)
    count = int(index.max()) + 1
    if count < 2:
        return Mean(float(mean), None)
    sums = torch.zeros(count, dtype=torch.float64).index_add_(0, index, values - mean)
    return Mean(float(mean), float(sums.square().sum().sqrt()) / len(values) * math.sqrt(count / (count - 1)))


def percentile(values: Tensor, percent: float) -> float:
    """Return the smallest value that at least ``percent`` % of the values do not exceed; `torch.quantile` limits their number."""
    return float(values.kthvalue(max(1, math.ceil(values.numel() * percent / 100 - 1e-9))).values)
