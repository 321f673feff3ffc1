"""Classes for the parameters of a block during tuning.

`TunedLayer` has the codes and scales of one layer, and `Adam` optimizes one tensor.

A tuned weight is one of two neighbouring grid values. Adam optimizes the scales, norms and biases of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quark.algorithms import StackedWeights
from quark.base.scalars import divided
from quark_algos.tuning.config import TuningConfig

__all__ = ["Adam", "TunedLayer"]


_BETA1, _BETA2 = 0.9, 0.95
"""Decay factors of the mean and of the mean square of the gradient. The usual 0.999 is too slow, because
tuning has only tens of steps.
"""


class Adam:
    """A tensor that Adam optimizes, without weight decay (arXiv 1412.6980).

    Args:
        value: The tensor. It is changed in place.
    """

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self._mean = torch.zeros_like(value)
        self._square = torch.zeros_like(value)
        self._steps = 0

    def step(self, gradient: Tensor, lr: float) -> None:
        """Change the tensor by one step against ``gradient``."""
        self._steps += 1
        self._mean.lerp_(gradient, 1 - _BETA1)
        self._square.mul_(_BETA2).addcmul_(gradient, gradient, value=1 - _BETA2)
        size = divided(self._square, 1 - _BETA2**self._steps).sqrt_().add_(torch.finfo(gradient.dtype).tiny)
        self.value.addcdiv_(self._mean, size, value=-lr / (1 - _BETA1**self._steps))


class TunedLayer:
    """The state of one layer during tuning. For each weight, tuning chooses between two neighbouring grid
    values.

    The float weight w lies between q, the value that the rounding algorithm chose, and q', a neighbouring
    grid value. A latent variable v chooses between q and q': if v is positive, the larger value is chosen. v
    starts at the position of w between the two values, ``v = (w − (q + q') / 2) / |q' − q|``. But it starts
    at a distance of at least ``margin`` from 0, with the sign that chooses q. The straight-through gradient
    of this choice is ``∂L/∂v = |q' − q| ∂L/∂W``, and each step changes v against the sign of this gradient.
    So v is the rounding offset of AutoRound (arXiv 2309.05516), but tuning can start from the result of any
    rounding algorithm. Group scales are tuned while codes are fixed (arXiv 2407.11062).

    Args:
        weights: The rounded weights of the layer.
        float_weight: The float weight, ``[N, K]``.
        settings: The settings of the algorithm.
        dtype: Dtype in which matrix products are computed.
    """

    def __init__(self, weights: StackedWeights, float_weight: Tensor, settings: TuningConfig, dtype: torch.dtype) -> None:
        self._weights = weights
        self._grid = weights.rounded_grid()
        self._dtype = dtype
        self._qt = weights.wt  # [K, N]
        self._other_qt = self._qt
        self._groups = self._grid.current.scale.shape[0]
        self._is_chosen = settings.rounding
        self._middle = self._as_leaf(self._qt)
        if settings.rounding:
            w = float_weight.t().float().contiguous()
            self._other_qt = self._grid.neighbours(self._qt, w)
            step = self._other_qt - self._qt
            # A negative u chooses q. u may be NaN if a value has no other neighbour; then both choices are
            # equal.
            u = ((w - self._qt) / step).clamp_(0, 0.5 - settings.margin).sub_(0.5)
            # bfloat16 has enough precision near the threshold at 0. With float32, results are a little worse.
            self._latent = torch.copysign(u, -step).t().contiguous().bfloat16()
            self._half = self._as_leaf(step.abs_().mul_(0.5))
            self._middle = self._as_leaf((self._qt + self._other_qt).mul_(0.5))
        self._scale: Adam | None = None
        if settings.scales and self._grid.can_be_rescaled:
            self._scale = Adam(
                torch.zeros(self._groups, self._qt.shape[1], device=self._qt.device, dtype=torch.float32)
            )  # [groups, N], relative
        self.leaf = self._middle

    def _as_leaf(self, values: Tensor) -> Tensor:
        """Transpose ``values [K, N]`` to ``[N, K]``, and convert them to the dtype of matrix products."""
        return values.t().contiguous().to(self._dtype)

    def weight(self) -> Tensor:
        """Return the current weight ``[N, K]``.

        It is a leaf tensor, so that autograd can accumulate the gradient of one step in it.
        """
        weight = torch.copysign(self._half, self._latent).add_(self._middle) if self._is_chosen else self._middle.clone()
        if self._scale is not None:
            factor = self._grid.rescaled(1 + self._scale.value).scale.div_(self._grid.current.scale).t().to(self._dtype)
            weight.view(len(weight), self._groups, -1).mul_(factor.unsqueeze(-1))
        self.leaf = weight.requires_grad_()
        return self.leaf

    def update(self, lr: float, scale_lr: float) -> None:
        """Change codes and scales by one step against the gradient of the weight."""
        gradient = self.leaf.grad
        if gradient is None:  # the layer belongs to an expert that no token has reached
            return
        if self._scale is not None:
            relative = self.leaf.detach().mul_(gradient).view(len(gradient), self._groups, -1).sum(-1).float()
            self._scale.step(relative.t(), scale_lr)
        if self._is_chosen:
            self._latent.sub_(gradient.sign_(), alpha=lr)

    def state(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the state from which `write` can restore the current codes and scales."""
        return self._latent.signbit() if self._is_chosen else None, None if self._scale is None else self._scale.value.clone()

    def write(self, state: tuple[Tensor | None, Tensor | None]) -> int:
        """Store the codes and scales of a state in the layer.

        Return how many codes differ from the codes that the rounding algorithm chose.
        """
        is_smaller, factor = state
        grid = self._grid
        qt, scales = self._qt, grid.current
        if is_smaller is not None:
            qt = torch.where(is_smaller.t(), torch.minimum(qt, self._other_qt), torch.maximum(qt, self._other_qt))
        changed = int((qt != self._qt).sum())
        if factor is not None:
            scales = grid.rescaled(1 + factor)
            size = qt.shape[0] // self._groups
            qt = grid.round_(qt * (scales.scale / grid.current.scale).repeat_interleave(size, 0), scales)
        self._weights.keep(grid, qt, scales)
        return changed
