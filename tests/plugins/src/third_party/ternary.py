"""-1, 0 and 1, five in a byte: the number format with the fewest magnitudes, one besides 0."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from quark.config.tensor import QTensorConfig
from quark.numbers import Granularity, NumberFormat, Packing

_PLACES = (1, 3, 9, 27, 81)


class FiveInAByte(Packing):
    """Five digits of base 3 make a byte; a row ends with digits that are 0."""

    def pack(self, codes: Tensor, granularity: Granularity, order: str) -> Tensor:
        digits = pad(codes, (0, -codes.shape[-1] % 5)).int().unfold(-1, 5, 5)
        return (digits * torch.tensor(_PLACES, device=codes.device)).sum(-1).to(torch.uint8)

    def unpack(self, packed: Tensor, granularity: Granularity, order: str, shape: tuple[int, ...]) -> Tensor:
        digits = packed.int().unsqueeze(-1) // torch.tensor(_PLACES, device=packed.device) % 3
        return digits.to(torch.uint8).flatten(-2)[..., : shape[-1]].contiguous()


class Ternary(NumberFormat):
    """Codes 0…2 of -1…1."""

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
