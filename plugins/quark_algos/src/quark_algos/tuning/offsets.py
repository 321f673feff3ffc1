"""OffsetLayer: the rounding offsets and clipping factors of one layer while AutoRound tunes them."""

from __future__ import annotations

import torch
from torch import Tensor

from quark.algorithms import StackedWeights
from quark.numbers import GroupScales
from quark_algos.tuning.config import AutoRoundConfig

__all__ = ["OffsetLayer"]

_NARROWEST = 0.5
"""Least factor of a range: AutoRound's bound is 0, at which all weights of a group would be 0."""


class OffsetLayer:
    """One layer: ``Q = round(W + V d)`` with the scales ``α s``, for offsets V in ±1/2 and factors α of each group up to 1.

    s are the scales of round-to-nearest, and d is the distance from each nearest value to the next on the
    side of the weight: the scale itself in formats of whole numbers. ``∂Q/∂V = d`` where Q is not clipped,
    and ``∂Q/∂α = (Q − W) / α``, or ``Q / α`` where it is. Eq. 3 to 5 of arXiv 2309.05516, with one α for both
    ends of a range.

    Args:
        weights: The rounded weights of the layer.
        float_weight: ``[N, K]``.
        settings: What is tuned, and the dtype.
    """

    def __init__(self, weights: StackedWeights, float_weight: Tensor, settings: AutoRoundConfig) -> None:
        self._weights = weights
        self._grid = weights.rounded_grid()
        self._dtype: torch.dtype = getattr(torch, settings.compute_dtype)
        self._wt = float_weight.t().float().contiguous()  # [K, N]
        self._distance = (self._grid.neighbours(weights.wt, self._wt) - weights.wt).abs_()
        self._offsets = torch.zeros_like(self._wt)
        groups = self._grid.current.scale.shape[0]
        has_factors = settings.enable_minmax_tuning and self._grid.can_be_rescaled
        self._factors = torch.ones(groups, self._wt.shape[1], device=self._wt.device) if has_factors else None
        self._size = self._wt.shape[0] // groups
        self._qt = weights.wt
        self.leaf = self._qt

    def weight(self) -> Tensor:
        """Return the rounded weight as it is now, ``[N, K]``, a leaf for one step's gradient."""
        self._qt, _ = self._rounded(self._offsets, self._factors)
        self.leaf = self._qt.t().contiguous().to(self._dtype).requires_grad_()
        return self.leaf

    def update(self, lr: float, scale_lr: float) -> None:
        """Make one step against the sign of the gradients."""
        if self.leaf.grad is None:
            return
        gradient = self.leaf.grad.t().float()
        moved = self._wt + self._offsets * self._distance
        is_clipped = (moved - self._qt).abs_() > self._distance
        if self._factors is not None:
            change = torch.where(is_clipped, self._qt, self._qt - self._wt).mul_(gradient)
            self._factors.sub_(change.view(-1, self._size, change.shape[1]).sum(1).sign_(), alpha=scale_lr).clamp_(_NARROWEST, 1)
        self._offsets.sub_(torch.where(is_clipped, 0, gradient).sign_(), alpha=lr).clamp_(-0.5, 0.5)

    def state(self) -> tuple[Tensor, Tensor | None]:
        """Return what `write` needs to go back to the codes and scales of now."""
        return self._offsets.clone(), None if self._factors is None else self._factors.clone()

    def write(self, state: tuple[Tensor, Tensor | None]) -> int:
        """Give the layer the codes and scales of a state; returns how many codes differ from those of round-to-nearest."""
        qt, scales = self._rounded(*state)
        before = self._weights.wt / self._grid.current.scale.repeat_interleave(self._size, 0)
        after = qt / scales.scale.repeat_interleave(self._size, 0)
        self._weights.keep(self._grid, qt, scales)
        return int(((before - after).abs_() > 2**-10).sum())

    def _rounded(self, offsets: Tensor, factors: Tensor | None) -> tuple[Tensor, GroupScales]:
        """Return the rounded weights ``[K, N]`` and the scales of all groups."""
        moved = torch.addcmul(self._wt, offsets, self._distance)
        if factors is None:
            return self._grid.round_(moved, self._grid.each), self._grid.current
        scales = self._grid.rescaled(factors)
        return self._grid.round_(moved, scales), scales
