"""Layers of a third party: a linear layer and a convolution with a gain, and an embedding with a factor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quark.models.layers import QuantizedConvolution, QuantizedLayer


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


class GainedTranspose(nn.ConvTranspose2d):
    """``gain · conv_transpose2d(x)``."""

    def __init__(self, inputs: int, outputs: int, kernel: int, groups: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, groups=groups)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, outputs))

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return self.gain[:, None, None] * super().forward(x, *args)


class QuantGainedTranspose(QuantizedConvolution, GainedTranspose):  # type: ignore[misc]
    """A quantized `GainedTranspose`; the gain stays float."""


class ScaledEmbedding(nn.Embedding):
    """``factor · weight[x]``."""

    def __init__(self, tokens: int, features: int) -> None:
        super().__init__(tokens, features)
        self.register_buffer("factor", torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.factor * super().forward(x)
        return y


class QuantScaledEmbedding(QuantizedLayer, ScaledEmbedding):  # type: ignore[misc]
    """A quantized `ScaledEmbedding`; the factor stays float."""
