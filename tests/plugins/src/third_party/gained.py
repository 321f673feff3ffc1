"""A transposed convolution with a gain for each output, an embedding times a factor, and what both become."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quark.models.layers import QuantizedConvolution, QuantizedLayer

__all__ = ["GainedTranspose", "QuantGainedTranspose", "QuantScaledEmbedding", "ScaledEmbedding"]


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
