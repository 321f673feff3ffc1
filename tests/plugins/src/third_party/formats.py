"""Two number formats of four methods: signed powers of two; and -1, 0 and 1, five in a byte."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from quark.config.tensor import QTensorConfig
from quark.numbers import Granularity, NumberFormat, Packing

BOUNDS = (0.5, 1.5, 3.0)
"""Midpoints between neighbouring values: 0.5 rounds to 0, 1.5 to 2 and 3 to 2, which have the even codes."""


class SignedPowers(NumberFormat):
    """A format with codes −3…3 in int8: the sign, and the index of the magnitude in 0, 1, 2, 4."""

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


_PLACES = (1, 3, 9, 27, 81)


class FiveInAByte(Packing):
    """Packs five digits of base 3 in a byte, and fills a row with digits 0."""

    def pack(self, codes: Tensor, granularity: Granularity, order: str) -> Tensor:
        digits = pad(codes, (0, -codes.shape[-1] % 5)).int().unfold(-1, 5, 5)
        return (digits * torch.tensor(_PLACES, device=codes.device)).sum(-1).to(torch.uint8)

    def unpack(self, packed: Tensor, granularity: Granularity, order: str, shape: tuple[int, ...]) -> Tensor:
        digits = packed.int().unsqueeze(-1) // torch.tensor(_PLACES, device=packed.device) % 3
        return digits.to(torch.uint8).flatten(-2)[..., : shape[-1]].contiguous()


class Ternary(NumberFormat):
    """A format with codes 0…2 for the values -1…1."""

    name = "third_ternary"
    bits = 1.6
    storage_dtype = torch.uint8
    packing = FiveInAByte()

    def max_magnitude(self, spec: QTensorConfig) -> float:
        return 1.0

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return t.round_().clamp_(-1, 1)

    def encode(self, t: Tensor) -> Tensor:
        return (t.nan_to_num(0.0) + 1).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        return codes.float() - 1


TERNARY = Ternary()
