"""Packing of small floats: two FP4 codes to a byte, four FP6 codes to three bytes, FP8 codes as they are; scales in the spec's format."""

from __future__ import annotations

import attrs
from torch import Tensor

from quark.config.tensor import QTensorConfig
from quark.numbers import Granularity, Packing, QParams
from quark_schemes.arithmetic.bits import pack_six, pack_two, unpack_six, unpack_two
from quark_schemes.scale_formats import scale_format_of

__all__ = ["SmallFloatPacking"]


@attrs.frozen
class SmallFloatPacking(Packing):
    """Codes of ``bits`` bits along the last axis; scales in the spec's scale format, no zero points."""

    bits: int

    def pack(self, codes: Tensor, granularity: Granularity, order: str) -> Tensor:
        if self.bits == 4:
            return pack_two(codes)
        return pack_six(codes) if self.bits == 6 else codes

    def unpack(self, packed: Tensor, granularity: Granularity, order: str, shape: tuple[int, ...]) -> Tensor:
        if self.bits == 4:
            return unpack_two(packed, shape[-1])
        return unpack_six(packed, shape[-1]) if self.bits == 6 else packed

    def pack_qparams(self, qparams: QParams, spec: QTensorConfig, granularity: Granularity, order: str) -> dict[str, Tensor]:
        return {"scale": scale_format_of(spec).encode(qparams.scale)}

    def unpack_qparams(
        self, tensors: dict[str, Tensor], spec: QTensorConfig, granularity: Granularity, order: str, shape: tuple[int, ...]
    ) -> QParams:
        return QParams(scale_format_of(spec).decode(tensors["scale"]))
