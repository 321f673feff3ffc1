"""A linear layer with a gain for each output, which is no subclass of ``nn.Linear``."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from quark.models.layers import QuantizedLayer


class Gated(nn.Module):
    """``gain * (x @ weight.T) + bias``. Input ``[…, I]``, output ``[…, O]``."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.randn(out_features, in_features) / in_features**0.5)
        self.bias = nn.Parameter(torch.zeros(out_features))
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, out_features))
        self.register_buffer("offset", torch.full((out_features,), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * functional.linear(x, self.weight) + self.bias + self.offset


class QuantGated(QuantizedLayer, Gated):
    """A quantized `Gated`: its gain stays float."""
