"""TunedLayer: the codes and scales of one layer while they are tuned. Each weight is one of two neighbouring values of its grid."""

from __future__ import annotations

import torch
from torch import Tensor

from quark.algorithms import StackedWeights
from quark_algos.tuning.adam import Adam
from quark_algos.tuning.config import TuningConfig

__all__ = ["TunedLayer"]


class TunedLayer:
    """One layer: weights ``q`` of a rounding, their neighbours ``q'`` on the side of the float weights ``w``, and a choice between the two.

    The latent ``u = (w − q) / (q' − q) − 1/2`` of each weight, at most ``−margin`` at first, chooses ``q'`` where it is above 0. Gradients
    pass straight through this choice: ``∂L/∂u = (q' − q) ∂L/∂W``, and each step moves u against the sign of it. That is the rounding offset
    of AutoRound (arXiv 2309.05516), started from another rounding than the nearest. Scales of groups are tuned under fixed codes
    (arXiv 2407.11062).

    Args:
        weights: The rounded weights of the layer.
        float_weight: ``[N, K]``.
        settings: What is tuned, and the dtype.
    """

    def __init__(self, weights: StackedWeights, float_weight: Tensor, settings: TuningConfig) -> None:
        self._weights = weights
        self._grid = weights.rounded_grid()
        self._dtype: torch.dtype = getattr(torch, settings.compute_dtype)
        self._qt = weights.wt  # [K, N]
        self._other_qt = self._qt
        self._groups = self._grid.current.scale.shape[0]
        self._q = self._qt.t().contiguous().to(self._dtype)  # [N, K]
        self._is_chosen = settings.rounding
        if settings.rounding:
            w = float_weight.t().float()
            self._other_qt = self._grid.neighbours(self._qt, w)
            step = self._other_qt - self._qt
            u = torch.where(step != 0, (w - self._qt) / step, 0).clamp_(0, 0.5 - settings.margin).sub_(0.5)
            self._other = self._other_qt.t().contiguous().to(self._dtype)
            # Near its threshold at 0, bfloat16 resolves u finely.
            self._u, self._step = (x.t().contiguous().to(self._dtype) for x in (u, step))
        self._scale: Adam | None = None
        if settings.scales and self._grid.can_be_rescaled:
            self._scale = Adam(torch.zeros(self._groups, self._qt.shape[1], device=self._qt.device))  # [groups, N], relative
        self._chosen = self._q
        self.leaf = self._q

    def weight(self) -> Tensor:
        """Return the weight as it is now, ``[N, K]``, a leaf for one step's gradient."""
        if self._is_chosen:
            self._chosen = torch.where(self._u > 0, self._other, self._q)
        weight = self._chosen
        if self._scale is not None:
            factor = (self._grid.rescaled(1 + self._scale.value).scale / self._grid.current.scale).t().to(self._dtype)
            weight = (weight.view(len(weight), self._groups, -1) * factor.unsqueeze(-1)).view_as(weight)
        self.leaf = weight.detach().requires_grad_()
        return self.leaf

    def update(self, lr: float, scale_lr: float) -> None:
        """Make one step against the gradient of the weight."""
        gradient = self.leaf.grad
        if gradient is None:  # of an expert that no token has reached
            return
        if self._scale is not None:
            relative = (gradient * self._chosen).view(len(gradient), self._groups, -1).sum(-1, dtype=torch.float32)
            self._scale.step(relative.t(), scale_lr)
        if self._is_chosen:
            self._u.sub_(gradient.mul_(self._step).sign_(), alpha=lr)

    def state(self) -> tuple[Tensor | None, Tensor | None]:
        """Return what `write` needs to go back to the codes and scales of now."""
        return self._u > 0 if self._is_chosen else None, None if self._scale is None else self._scale.value.clone()

    def write(self, state: tuple[Tensor | None, Tensor | None]) -> int:
        """Give the layer the codes and scales of a state; returns how many codes differ from those of the rounding."""
        chosen, factor = state
        grid = self._grid
        qt, scales = self._qt, grid.current
        if chosen is not None:
            qt = torch.where(chosen.t(), self._other_qt, qt)
        if factor is not None:
            scales = grid.rescaled(1 + factor)
            size = qt.shape[0] // self._groups
            qt = grid.round_(qt * (scales.scale / grid.current.scale).repeat_interleave(size, 0), scales)
        self._weights.keep(grid, qt, scales)
        return 0 if chosen is None else int((chosen.t() & (self._other_qt != self._qt)).sum())
