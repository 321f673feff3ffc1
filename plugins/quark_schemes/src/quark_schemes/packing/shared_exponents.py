"""Packing of block floating point: the exponent of a block is stored as a byte, exponent + 127."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from quark.config.tensor import QTensorConfig
from quark.numbers import Granularity, Packing, PerGroup, QParams
from quark_schemes.arithmetic.bits import pack_bits, pack_flags, unpack_bits, unpack_flags
from quark_schemes.arithmetic.shared_exponent import decode_e8m0, encode_e8m0

__all__ = ["PAIR_BITS", "MicroexponentPacking", "SharedExponentPacking"]

PAIR_BITS = 8
"""Pairs whose bits fill a byte."""


@attrs.frozen
class SharedExponentPacking(Packing):
    """Mantissas as they are; the scale of a block, ``2^(E − fraction_bits)``, as the byte of its exponent E."""

    fraction_bits: int

    def pack_qparams(self, qparams: QParams, spec: QTensorConfig, granularity: Granularity, order: str) -> dict[str, Tensor]:
        return {"scale": encode_e8m0(qparams.scale * 2.0**self.fraction_bits)}

    def unpack_qparams(
        self, tensors: dict[str, Tensor], spec: QTensorConfig, granularity: Granularity, order: str, shape: tuple[int, ...]
    ) -> QParams:
        return QParams(decode_e8m0(tensors["scale"]) * 2.0**-self.fraction_bits)


@attrs.frozen
class MicroexponentPacking(SharedExponentPacking):
    """Block by block: mantissas of ``mantissa_bits`` bits in two's complement, little endian, then a bit for each pair of neighbours."""

    mantissa_bits: int

    def pack(self, codes: Tensor, granularity: Granularity, order: str) -> Tensor:
        blocks = codes.reshape(*codes.shape[:-1], -1, _block(granularity))
        mantissas = (blocks >> 1).to(torch.int8)
        packed = pack_bits(mantissas, self.mantissa_bits) if self.mantissa_bits < 8 else mantissas.view(torch.uint8)
        pairs = pack_flags((blocks[..., ::2] & 1).to(torch.uint8))
        return torch.cat((packed, pairs), dim=-1).reshape(*codes.shape[:-1], -1)

    def unpack(self, packed: Tensor, granularity: Granularity, order: str, shape: tuple[int, ...]) -> Tensor:
        block = _block(granularity)
        mantissa_bytes = block * self.mantissa_bits // 8
        blocks = packed.reshape(*shape[:-1], shape[-1] // block, mantissa_bytes + block // (2 * PAIR_BITS))
        data, pairs = blocks[..., :mantissa_bytes].contiguous(), blocks[..., mantissa_bytes:]
        narrow = self.mantissa_bits < 8
        mantissas = unpack_bits(data, self.mantissa_bits, block, signed=True) if narrow else data.view(torch.int8)
        flags = unpack_flags(pairs).repeat_interleave(2, dim=-1)
        return mantissas.to(torch.int16).bitwise_left_shift_(1).bitwise_or_(flags).reshape(shape)


def _block(granularity: Granularity) -> int:
    assert isinstance(granularity, PerGroup)
    return granularity.size
