"""Adam for the few parameters of a block that are tuned by the size of their gradient: scales, norms, biases."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Adam"]

_BETA1, _BETA2 = 0.9, 0.95
"""Decay of the mean gradient and of its mean square: a block is tuned in tens of steps, which 0.999 would not
follow.
"""


class Adam:
    """A tensor that Adam changes, without weight decay (arXiv 1412.6980).

    Args:
        value: The tensor, which is changed in place.
    """

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self._mean = torch.zeros_like(value)
        self._square = torch.zeros_like(value)
        self._steps = 0

    def step(self, gradient: Tensor, lr: float) -> None:
        """Make one step against a gradient."""
        self._steps += 1
        self._mean.lerp_(gradient, 1 - _BETA1)
        self._square.mul_(_BETA2).addcmul_(gradient, gradient, value=1 - _BETA2)
        size = (self._square / (1 - _BETA2**self._steps)).sqrt_().add_(torch.finfo(gradient.dtype).tiny)
        self.value.addcdiv_(self._mean, size, value=-lr / (1 - _BETA1**self._steps))
