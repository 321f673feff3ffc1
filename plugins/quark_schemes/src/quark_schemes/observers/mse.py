"""Observers with the smallest squared error: the full range is shrunk while the gain of finer steps exceeds the loss by clipping.

Per tensor the error is that of the histogram's bin centres, which differs from the data's own by at most half
a bin's width, root mean square: the distance to the nearest value of a format changes no faster than the
value itself. Per channel and per group it is the data's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quark.config.enums import QSchemeType
from quark_schemes.observers.histogram import Histogram
from quark_schemes.observers.histogram_observer import HistogramObserver
from quark_schemes.observers.least_squares import Range, shrunk_range
from quark_schemes.observers.row_search import RowSearchObserver

__all__ = ["ROW_FACTORS", "TENSOR_FACTORS", "PerChannelMSEObserver", "PerGroupMSEObserver", "PerTensorMSEObserver"]

_STEPS_TO_HALF = 16
"""Candidates per halving of the range: neighbours differ by 4 %."""
TENSOR_FACTORS = tuple(2 ** (-i / _STEPS_TO_HALF) for i in range(10 * _STEPS_TO_HALF + 1))
"""Factors of the range of a tensor: 16 steps per halving, ten halvings, since activations can have outliers
1000 times the others.
"""
ROW_FACTORS = TENSOR_FACTORS[: 3 * _STEPS_TO_HALF + 1]
"""Factors of the range of a channel or group of a weight, down to an eighth."""


class PerTensorMSEObserver(HistogramObserver):
    """One range per tensor, with the smallest squared error in the spec's own format; `shrunk_range` has the candidates."""

    def _choose(self, histogram: Histogram) -> tuple[Tensor | float, Tensor | float]:
        values = histogram.distribution()
        device = values.counts.device
        low, high = (torch.tensor([bound], dtype=torch.float32, device=device) for bound in (values.low, values.high))
        return shrunk_range(values.centres.float().unsqueeze(0), low, high, self.spec, TENSOR_FACTORS, values.counts.double())


class _RowMSEObserver(RowSearchObserver):
    def _search(self, rows: Tensor, low: Tensor, high: Tensor) -> Range:
        return shrunk_range(rows, low, high, self.spec, ROW_FACTORS)


class PerChannelMSEObserver(_RowMSEObserver):
    """One range per channel of a weight, with the smallest squared error."""

    qschemes = (QSchemeType.per_channel,)


class PerGroupMSEObserver(_RowMSEObserver):
    """One range per group of a weight, with the smallest squared error."""

    qschemes = (QSchemeType.per_group,)
