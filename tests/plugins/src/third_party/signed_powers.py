"""0 and the powers of two ±1, ±2, ±4: a number format in four methods."""

from __future__ import annotations

import torch
from torch import Tensor

from quark.config.tensor import QTensorConfig
from quark.numbers import NumberFormat

BOUNDS = (0.5, 1.5, 3.0)
"""Halfway between neighbours: 0.5 goes to 0, 1.5 to 2 and 3 to 2, which have the even codes."""


class SignedPowers(NumberFormat):
    """Codes −3…3 in int8: the sign, and the place of the magnitude among 0, 1, 2, 4."""

    name = "third_powers"
    bits = 8
    storage_dtype = torch.int8

    def max_magnitude(self, spec: QTensorConfig) -> float:
        return 4.0

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return t.copy_(torch.where(t.isnan(), t, self.decode(self.encode(t))))

    def encode(self, t: Tensor) -> Tensor:
        size = t.abs()
        code = (size > BOUNDS[0]).to(torch.int8) + (size >= BOUNDS[1]).to(torch.int8) + (size > BOUNDS[2]).to(torch.int8)
        return torch.where(t < 0, -code, code)

    def decode(self, codes: Tensor) -> Tensor:
        size = codes.abs()
        return codes.sign().float() * torch.where(size == 3, 4, size).float()


SIGNED_POWERS = SignedPowers()
