"""AutoRound: optimizes rounding offsets and clipping by signed gradient descent (arXiv 2309.05516)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from quark.algorithms import Metrics, RoundedBlock, StackedWeights, Tuning
from quark.numbers import GroupScales
from quark_algos.tuning.block import BlockState, dtype_of_products, fitted, means
from quark_algos.tuning.config import AutoRoundConfig

__all__ = ["AutoRound", "OffsetLayer"]

_NARROWEST = 0.5
"""Smallest factor of a range. AutoRound itself uses 0, but then all weights of a group could become 0."""


class AutoRound(Tuning):
    """The algorithm ``autoround``.

    It reports three metrics for a block. ``first_loss`` and ``best_loss`` are the mean squared errors of the
    output in the first and in the best step. ``codes`` is the share of codes that differ from
    round-to-nearest.

    Args:
        settings: An `AutoRoundConfig`.
    """

    wants_float = True

    def __init__(self, settings: AutoRoundConfig) -> None:
        self._settings = settings.resolved()
        self._lr, self._minmax_lr = (cast("float", lr) for lr in (self._settings.lr, self._settings.minmax_lr))

    @torch.no_grad()
    def tune(self, block: RoundedBlock) -> Mapping[str, Metrics]:
        """Tune a block. See `quark.algorithms.Tuning.tune`.

        As in the paper, the block gets the codes and scales of the step with the smallest loss.
        """
        settings = self._settings
        samples = fitted(block)
        if not samples:
            return {}
        dtype = dtype_of_products(settings.compute_dtype, samples)
        layers = {name: OffsetLayer(block.weights(name), block.float_weights[name], settings, dtype) for name in block.layers}
        state = BlockState(layers, {}, dtype, None)
        generator = torch.Generator().manual_seed(0)
        losses: list[float] = []
        best = state.current()
        for step in range(settings.iters):
            batch = torch.randperm(len(samples), generator=generator)[: settings.batch_size].tolist()
            loss, _ = means([state.backward(block, samples[i], len(batch)) for i in batch])
            if not losses or loss < min(losses):
                best = state.current()
            losses.append(loss)
            decay = 1 - step / settings.iters
            state.step(self._lr * decay, self._minmax_lr * decay, 0.0)
        return {"": {"first_loss": losses[0], "best_loss": min(losses), "codes": state.write(block, best)}}


class OffsetLayer:
    """The state of one layer while AutoRound optimizes the layer. The rounded weight is ``Q = round(W + V
    d)``, with the scales ``α s``.

    W is the float weight, and s are the scales of round-to-nearest. V has an offset from -1/2 to 1/2 for each
    weight, and α has a factor of at most 1 for each group. V and α are optimized. d is the distance between
    the two grid values around a weight; in integer formats, this is the scale.

    The gradients are ``∂Q/∂V = d``, and ``∂Q/∂α = (Q − W) / α`` for a weight that is not clipped, or
    ``∂Q/∂α = Q / α`` for a weight that is clipped. Source: arXiv 2309.05516, equations 3 to 5, with one α for
    both ends of a range.

    Args:
        weights: The rounded weights of the layer.
        float_weight: The float weight, ``[N, K]``.
        settings: The settings of the algorithm.
        dtype: Dtype in which matrix products are computed.
    """

    def __init__(self, weights: StackedWeights, float_weight: Tensor, settings: AutoRoundConfig, dtype: torch.dtype) -> None:
        self._weights = weights
        self._grid = weights.rounded_grid()
        self._dtype = dtype
        self._wt = float_weight.t().float().contiguous()  # [K, N]
        self._distance = (self._grid.neighbours(weights.wt, self._wt) - weights.wt).abs_()
        self._offsets = torch.zeros_like(self._wt)
        groups = self._grid.current.scale.shape[0]
        has_factors = settings.enable_minmax_tuning and self._grid.can_be_rescaled
        self._factors = torch.ones(groups, self._wt.shape[1], device=self._wt.device, dtype=torch.float32) if has_factors else None
        self._size = self._wt.shape[0] // groups
        self._qt = weights.wt
        self.leaf = self._qt

    def weight(self) -> Tensor:
        """Return the current rounded weight ``[N, K]``.

        It is a leaf tensor, so that autograd can accumulate the gradient of one step in it.
        """
        self._qt, _ = self._rounded(self._offsets, self._factors)
        self.leaf = self._qt.t().contiguous().to(self._dtype).requires_grad_()
        return self.leaf

    def update(self, lr: float, scale_lr: float) -> None:
        """Change the offsets by ``lr`` and the factors by ``scale_lr``, against the signs of their
        gradients.
        """
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
        """Return the current offsets and factors. `write` can restore the codes and scales of this state."""
        return self._offsets.clone(), None if self._factors is None else self._factors.clone()

    def write(self, state: tuple[Tensor, Tensor | None]) -> int:
        """Store the codes and scales of a state in the layer, and return how many codes differ from
        round-to-nearest.
        """
        qt, scales = self._rounded(*state)
        before = self._weights.wt / self._grid.current.scale.repeat_interleave(self._size, 0)
        after = qt / scales.scale.repeat_interleave(self._size, 0)
        self._weights.keep(self._grid, qt, scales)
        return int(((before - after).abs_() > 2**-10).sum())

    def _rounded(self, offsets: Tensor, factors: Tensor | None) -> tuple[Tensor, GroupScales]:
        """Return the rounded weights ``[K, N]`` for the given offsets and factors, and the scales of all
        groups.
        """
        moved = torch.addcmul(self._wt, offsets, self._distance)
        if factors is None:
            return self._grid.round_(moved, self._grid.each), self._grid.current
        scales = self._grid.rescaled(factors)
        return self._grid.round_(moved, scales), scales
