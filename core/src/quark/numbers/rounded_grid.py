"""`RoundedGrid` is the grid of weights that are rounded already.

It computes new scales, and the neighbouring grid values of each weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quark.numbers.column_rounder import GroupScales
from quark.numbers.number_format import QParams
from quark.numbers.observer import Observer
from quark.numbers.tensor_quantizer import TensorQuantizer
from quark.numbers.weight_grid import WeightGrid

_PROBES = 64
"""Number of probes for each power of two that find the distances of neighbours: enough for 5 bits of
mantissa.
"""
_OCTAVES = 24


class RoundedGrid(WeightGrid):
    """A `WeightGrid` of layers whose scales, including outer scales, are set.

    Args:
        quantizers: The weight quantizer of each layer. All layers must have the same spec.
        rows: The number of output channels of each layer. Their sum is N.
        weight: The rounded float32 weights ``[K, N]``.
        qparams: The scales of each layer.

    Attributes:
        current: The scales of all groups.
        each: If the format has subscales, the scales of all input channels: `current` multiplied by the
            subscales. Otherwise `current` itself.
    """

    def __init__(self, quantizers: Sequence[TensorQuantizer], rows: Sequence[int], weight: Tensor, qparams: Sequence[QParams]) -> None:
        self._given = list(qparams)
        super().__init__(quantizers, rows, weight)
        self.current = self._given_scales()
        self.each = self.with_subscales(weight, self.current)

    @property
    def can_be_rescaled(self) -> bool:
        """Whether `rescaled` may be called. This requires that each scale belongs to a single group of one
        row."""
        return self.fixed is None and not self.has_subscales

    def rescaled(self, factor: Tensor) -> GroupScales:
        """Multiply the current scales by ``factor [groups, N]``, and round the products to the scale format
        of the spec.

        The zero points do not change.
        """
        scale = self.current.scale * factor
        if self.current.zero is None:
            high = scale * self.max_magnitude
            return self.scales_of_ranges(-high, high)
        far = torch.finfo(torch.float32).max
        zero = self.current.zero
        low, high = (self._element_format.round_(torch.full_like(scale, end), zero) - zero for end in (-far, far))
        return self.scales_of_ranges(low * scale, high * scale)

    def neighbours(self, qt: Tensor, toward: Tensor) -> Tensor:
        """Return the neighbour of each value in ``qt [K, N]``. The neighbour is the next value of the grid in
        the direction of ``toward``.

        If the grid has no further value in this direction, return the value itself.
        """
        direction = torch.sign(toward - qt)
        size = qt.shape[0] // self.each.scale.shape[0]
        step = direction * self.each.scale.repeat_interleave(size, 0)
        result = qt.clone()
        for gap in self._gaps():
            same = result == qt
            result = torch.where(same, self.round_(torch.addcmul(qt, step, same.float(), value=gap), self.each), result)
        return result

    def _gaps(self) -> list[float]:
        """Return all distances between neighbouring grid values, in ascending order and in units of the
        scale."""
        far = torch.finfo(torch.float32).max
        largest = float(self._element_format.round_(torch.tensor([-far, far], dtype=torch.float32)).abs().max())
        probes = largest * torch.exp2(-torch.arange(_PROBES * _OCTAVES, dtype=torch.float32) / _PROBES)
        values = self._element_format.round_(torch.cat([probes, torch.zeros(1, dtype=torch.float32)])).unique()
        return values.diff().unique().tolist()

    def _given_scales(self) -> GroupScales:
        zeros = [q.zero_point for q in self._given if q.zero_point is not None]
        return self._group_scales(self._spread([q.scale for q in self._given]), self._spread(zeros) if zeros else None, self._outer)

    def _table(self, weight: Tensor, importance: Tensor | None) -> Tensor | None:
        return self._given[0].table

    def _outer_scales(self, weight: Tensor, common: Observer | None) -> list[Tensor] | None:
        outers = [q.outer_scale for q in self._given]
        return None if any(outer is None for outer in outers) else outers  # type: ignore[return-value]

    def _fixed_scales(self, weight: Tensor, common: Observer | None) -> GroupScales:
        scales = self._given_scales()
        self.group = self.columns // scales.scale.shape[0]
        return scales
