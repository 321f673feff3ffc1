"""Packing of integers: words of eight 4-bit codes, bytes of 2-bit and 3-bit codes; grouped weights are stored transposed.

Source: the checkpoints of AMD Quark 0.13 (``int4_wo_128``, ``int8``, ``uint4_wo_128``).
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from quark.config.enums import ZeroPointType
from quark.config.tensor import QTensorConfig
from quark.numbers import Granularity, Packing, PerGroup, QParams
from quark_schemes.arithmetic.bits import pack_bits, pack_nibbles, pack_nibbles_across, unpack_bits, unpack_nibbles
from quark_schemes.scale_formats import scale_format_of

__all__ = ["IntegerPacking"]


@attrs.frozen
class IntegerPacking(Packing):
    """Integers of ``bits`` bits, signed or not.

    With a scale per group a weight and its scales are stored transposed, ``[I, O]``; four-bit codes are eight
    to an int32 word along the last axis. Zero points are packed as codes are.
    """

    bits: int
    signed: bool
    storage_dtype: torch.dtype

    def pack(self, codes: Tensor, granularity: Granularity, order: str) -> Tensor:
        if self.bits == 4 and isinstance(granularity, PerGroup) and codes.ndim == 2:
            return pack_nibbles_across(codes, order)
        return self._pack(_laid_out(codes, granularity).contiguous(), order)

    def unpack(self, packed: Tensor, granularity: Granularity, order: str, shape: tuple[int, ...]) -> Tensor:
        stored = (shape[1], shape[0]) if isinstance(granularity, PerGroup) and len(shape) == 2 else shape
        return _laid_out(self._unpack(packed, order, stored[-1]), granularity).contiguous()

    def pack_qparams(self, qparams: QParams, spec: QTensorConfig, granularity: Granularity, order: str) -> dict[str, Tensor]:
        zero = torch.zeros_like(qparams.scale) if qparams.zero_point is None else qparams.zero_point
        scale, zero = _laid_out(qparams.scale, granularity), _laid_out(zero, granularity)
        if spec.zero_point_type is ZeroPointType.float32 and not spec.symmetric:
            stored = zero.contiguous()
        elif zero.ndim:
            stored = self._pack(zero.to(self.storage_dtype).contiguous(), order)
        else:
            stored = zero.to(self.storage_dtype)
        return {"scale": scale_format_of(spec).encode(scale.contiguous()), "zero_point": stored}

    def unpack_qparams(
        self, tensors: dict[str, Tensor], spec: QTensorConfig, granularity: Granularity, order: str, shape: tuple[int, ...]
    ) -> QParams:
        scale = scale_format_of(spec).decode(_laid_out(tensors["scale"], granularity).contiguous())
        stored = tensors.get("zero_point")
        if spec.symmetric or stored is None:
            return QParams(scale)
        if spec.zero_point_type is ZeroPointType.float32 or stored.ndim == 0:
            whole = spec.zero_point_type is ZeroPointType.int32
            return QParams(scale, _laid_out(stored.to(torch.int32) if whole else stored, granularity).contiguous())
        zero = self._unpack(stored, order, tensors["scale"].shape[-1])
        return QParams(scale, _laid_out(zero, granularity).to(torch.int32).contiguous())

    def _pack(self, codes: Tensor, order: str) -> Tensor:
        if self.bits == 4:
            return pack_nibbles(codes, order)
        return pack_bits(codes, self.bits) if self.bits < 4 else codes

    def _unpack(self, packed: Tensor, order: str, length: int) -> Tensor:
        if self.bits == 4:
            return unpack_nibbles(packed, order, length, signed=self.signed)
        return unpack_bits(packed, self.bits, length, signed=self.signed) if self.bits < 4 else packed


def _laid_out(x: Tensor, granularity: Granularity) -> Tensor:
    """Return ``x`` transposed where it belongs to a grouped integer weight, which is stored so; its own inverse."""
    return x.t() if isinstance(granularity, PerGroup) and x.ndim == 2 else x
