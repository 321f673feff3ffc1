"""Packing of small floats: two FP4 codes to a byte, four FP6 codes to three bytes, FP8 codes as they are."""

from __future__ import annotations

import attrs
from torch import Tensor

from quark.quantizers import Granularity
from quark_schemes.arithmetic.bits import pack_six, pack_two, unpack_six, unpack_two
from quark_schemes.packing.scales import FormattedScalePacking

__all__ = ["SmallFloatPacking"]


@attrs.frozen
class SmallFloatPacking(FormattedScalePacking):
    """Codes of ``bits`` bits along the last axis."""

    bits: int

    def pack(self, codes: Tensor, granularity: Granularity, order: str) -> Tensor:
        if self.bits == 4:
            return pack_two(codes)
        return pack_six(codes) if self.bits == 6 else codes

    def unpack(self, packed: Tensor, granularity: Granularity, order: str, shape: tuple[int, ...]) -> Tensor:
        if self.bits == 4:
            return unpack_two(packed, shape[-1])
        return unpack_six(packed, shape[-1]) if self.bits == 6 else packed
