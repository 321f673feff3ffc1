"""Observers whose range goes from the smallest to the largest value, and an observer without a range.

The min-max classes differ only in the granularities that they accept. Source: the observers of AMD Quark
0.13.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quark.config.enums import QSchemeType
from quark.config.tensor import QTensorConfig
from quark.numbers import TILE_ELEMENTS, Granularity, Observer, PerTensor, number_format
from quark.numbers.tiles import scratch
from quark_schemes.observers import ServingObserver

__all__ = [
    "MinMaxObserver",
    "PerBlock2DMinMaxObserver",
    "PerBlockBFPObserver",
    "PerBlockMXBufferReuseObserver",
    "PerBlockMXDiffsObserver",
    "PerBlockMXObserver",
    "PerChannelMinMaxObserver",
    "PerGroupMinMaxObserver",
    "PerTensorMinMaxObserver",
    "PlaceholderObserver",
]


class MinMaxObserver(ServingObserver):
    """Records the smallest and the largest value of each set of elements that share a scale.

    This observer supports every granularity.
    """

    is_extremes = True

    def __init__(self, spec: QTensorConfig, granularity: Granularity | torch.device | str | None = None) -> None:
        super().__init__(spec, granularity)
        self._low: Tensor | None = None
        self._high: Tensor | None = None

    def observe(self, x: Tensor) -> None:
        if x.numel() == 0:
            return
        if isinstance(self.granularity, PerTensor):
            low, high = torch.aminmax(x.detach())
        else:
            low, high = _row_ranges(self.granularity.rows(x.detach()), symmetric=self.spec.symmetric is not False)
        shape = self.granularity.scale_shape(tuple(x.shape))
        self._take(low.float().reshape(shape), high.float().reshape(shape))

    def _take(self, low: Tensor, high: Tensor) -> None:
        self._low = low if self._low is None else torch.minimum(self._low, low)
        self._high = high if self._high is None else torch.maximum(self._high, high)

    def range(self) -> tuple[Tensor, Tensor]:
        if self._low is None or self._high is None:
            raise self.nothing_observed()
        return self._low, self._high

    def merge(self, other: Observer) -> None:
        seen = self.of_same_kind(other)
        if seen._low is not None and seen._high is not None:
            self._take(seen._low, seen._high)


def _row_ranges(rows: Tensor, *, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest value of each row of a matrix, each as float32 ``[rows]``.

    If ``symmetric`` is true, return ``-m`` and ``m`` instead, with the largest magnitude ``m`` of the row.

    On CPUs, two reductions are much faster than one fused reduction, and reductions in 32 bits are faster
    than in 16 bits. The function therefore converts the rows in tiles that fit the cache. It compares the
    bits of magnitudes as integers, which is even faster. The order is the same as for floats, with NaN last.
    """
    low, high = (torch.empty(rows.shape[0], dtype=torch.float32, device=rows.device) for _ in range(2))
    step = max(1, TILE_ELEMENTS // rows.shape[1])
    for top in range(0, rows.shape[0], step):
        part = slice(top, top + step)
        tile = rows[part].float() if rows.dtype is torch.float64 else rows[part]
        if symmetric:
            bits = torch.int16 if tile.dtype.itemsize == 2 else torch.int32
            room = scratch(tile.shape, torch.int32, tile.device, "magnitudes")
            magnitudes = torch.bitwise_and(tile.view(bits), torch.iinfo(bits).max, out=room)
            high[part] = magnitudes.amax(1).to(bits).view(tile.dtype)
        else:
            converted = tile if tile.dtype is torch.float32 else scratch(tile.shape, torch.float32, tile.device, "magnitudes").copy_(tile)
            torch.amin(converted, dim=1, out=low[part])
            torch.amax(converted, dim=1, out=high[part])
    return (-high if symmetric else low), high


class PerTensorMinMaxObserver(MinMaxObserver):
    """Records the smallest and the largest value of a tensor."""

    qschemes = (QSchemeType.per_tensor,)


class PerChannelMinMaxObserver(MinMaxObserver):
    """Records the smallest and the largest value of each channel or token."""

    qschemes = (QSchemeType.per_channel,)


class PerGroupMinMaxObserver(MinMaxObserver):
    """Records the smallest and the largest value of each group."""

    qschemes = (QSchemeType.per_group,)


class PerBlockMXObserver(MinMaxObserver):
    """Records the smallest and the largest value of each block of an MX format."""

    qschemes = (QSchemeType.per_group,)


class PerBlockMXBufferReuseObserver(PerBlockMXObserver):
    """The same observer as `PerBlockMXObserver`, under another name of AMD Quark.

    In AMD Quark, the observer of this name saves memory. Here, both observers use the same memory.
    """


class PerBlockMXDiffsObserver(PerBlockMXObserver):
    """The same observer as `PerBlockMXObserver`, under another name of AMD Quark.

    In AMD Quark, the observer of this name searches for the exponent. Here, the ``scale_calculation_mode`` of
    the spec determines the exponent, as in runtimes.
    """


class PerBlockBFPObserver(PerBlockMXObserver):
    """Records the smallest and the largest value of each block of a block floating-point format."""


class PerBlock2DMinMaxObserver(MinMaxObserver):
    """Records the smallest and the largest value of each two-dimensional block."""

    qschemes = (QSchemeType.per_block,)


class PlaceholderObserver(ServingObserver):
    """Observer for float16 and bfloat16. They need no range, so the observer does nothing."""

    @classmethod
    def spec_error(cls, spec: QTensorConfig) -> str | None:
        if not number_format(spec.dtype).is_cast:
            return f"{cls.__name__} observes nothing, but {spec.dtype.name} needs a range for its scales: use MinMaxObserver"
        return super().spec_error(spec)

    def observe(self, x: Tensor) -> None:
        """Do nothing."""

    def range(self) -> tuple[Tensor, Tensor]:
        """Return an empty range."""
        return torch.zeros((), dtype=torch.float32), torch.zeros((), dtype=torch.float32)

    def merge(self, other: Observer) -> None:
        """Do nothing."""
