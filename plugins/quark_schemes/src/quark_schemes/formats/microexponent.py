"""Shared microexponents, MX6 and MX9: block floating point in which a pair whose two values are small has a step half as wide.

A block shares an exponent E, each pair of neighbours one bit more: it is set where both values lie below 2^E. An element is a sign and
four (MX6) or seven (MX9) bits: six or nine bits in all with a sixteenth of the exponent and half of the pair's bit.

In a checkpoint a block is its mantissas in two's complement, packed little endian, then the pairs' bits, the first in the lowest place; the
exponents, E + 127, are the scales. Source: Darvish Rouhani et al., arXiv 2302.08007; spec of the documented surface, §2.5.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from quark.config.enums import RoundType
from quark.config.tensor import QTensorConfig
from quark.quantizers import Granularity, PerGroup
from quark_schemes import packing
from quark_schemes.formats.block_float import BlockFloat
from quark_schemes.formats.small_float import WHOLE_ROUNDINGS

_ONE_EXPONENT = 1 << 23
_MAGNITUDE = 0x7FFFFFFF
_PAIR_BITS = 8


def _bits(value: float) -> int:
    """The float32 bits of a number."""
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))


@attrs.frozen(kw_only=True)
class Microexponent(BlockFloat):
    """Block floating point with a bit of exponent for each pair along the last axis, which therefore has an even length.

    A code holds the mantissa above the pair's bit: ``2 · mantissa + bit``.
    """

    @property
    def _limit(self) -> float:
        """What both values of a pair lie below where its step is halved, in units of the wider step."""
        return float(1 << self.fraction_bits)

    def spec_error(self, spec: QTensorConfig) -> str | None:
        if spec.group_size is None or spec.group_size % (2 * _PAIR_BITS):
            return f"{self.name} has blocks of a multiple of 16, not {spec.group_size}: use 16 or 32"
        return super().spec_error(spec)

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        halved = self._halved(t)
        high = (_bits(float(self.high)) - halved).view(torch.float32)
        torch.clamp(t, -high, high, out=t)
        if self.rounding is not RoundType.half_even:
            step = (_bits(1.0) - halved).view(torch.float32)
            return t.copy_(WHOLE_ROUNDINGS[self.rounding](t / step).mul_(step))
        # Adding 1.5 · 2^23 steps leaves whole numbers of them, rounded half to even.
        magic = halved.neg_().add_(_bits(1.5 * 2.0**23)).view(torch.float32)
        return t.add_(magic).sub_(magic)

    def subscales(self, t: Tensor) -> Tensor:
        return (_bits(1.0) - self._halved(t)).view(torch.float32)

    def element_format(self) -> BlockFloat:
        return BlockFloat(**attrs.asdict(self, recurse=False))

    def _halved(self, t: Tensor) -> Tensor:
        """Int32, shaped as ``t``: one exponent's worth of float32 bits where the step is halved, else 0."""
        below = t.view(torch.int32).bitwise_and(_MAGNITUDE).sub_(_bits(self._limit))
        # Of two neighbours in one 64-bit number: the sign bit of the one and of the other, at the place of the higher.
        pair = below.view(torch.int64)
        both = pair.bitwise_left_shift(32).bitwise_and_(pair).bitwise_right_shift_(63)
        return both.view(torch.int32).bitwise_and_(_ONE_EXPONENT)

    def encode(self, t: Tensor) -> Tensor:
        halved = self._halved(t)
        factor = (halved + _bits(1.0)).view(torch.float32)
        mantissa = (t * factor).to(torch.int16)
        return mantissa.bitwise_left_shift_(1).bitwise_or_(halved.bitwise_right_shift_(23).to(torch.int16))

    def decode(self, codes: Tensor) -> Tensor:
        step = (codes.bitwise_and(1)).float().mul_(-0.5).add_(1.0)
        return step.mul_(codes >> 1)

    def pack(self, codes: Tensor, granularity: Granularity, order: str) -> Tensor:
        blocks = codes.reshape(*codes.shape[:-1], -1, _block(granularity))
        mantissas = (blocks >> 1).to(torch.int8)
        packed = packing.pack_bits(mantissas, self._element_bits) if self._element_bits < 8 else mantissas.view(torch.uint8)
        pairs = packing.pack_flags((blocks[..., ::2] & 1).to(torch.uint8))
        return torch.cat((packed, pairs), dim=-1).reshape(*codes.shape[:-1], -1)

    def unpack(self, packed: Tensor, granularity: Granularity, order: str, shape: tuple[int, ...]) -> Tensor:
        block = _block(granularity)
        mantissa_bytes = block * self._element_bits // 8
        blocks = packed.reshape(*shape[:-1], shape[-1] // block, mantissa_bytes + block // (2 * _PAIR_BITS))
        data, pairs = blocks[..., :mantissa_bytes].contiguous(), blocks[..., mantissa_bytes:]
        narrow = self._element_bits < 8
        mantissas = packing.unpack_bits(data, self._element_bits, block, signed=True) if narrow else data.view(torch.int8)
        flags = packing.unpack_flags(pairs).repeat_interleave(2, dim=-1)
        return mantissas.to(torch.int16).bitwise_left_shift_(1).bitwise_or_(flags).reshape(shape)

    @property
    def _element_bits(self) -> int:
        return self.high.bit_length() + 1


def _block(granularity: Granularity) -> int:
    assert isinstance(granularity, PerGroup)
    return granularity.size


MX6 = Microexponent(name="mx6", bits=5.5, storage_dtype=torch.int16, low=-15, high=15, fraction_bits=3, block=16)
MX9 = Microexponent(name="mx9", bits=8.5, storage_dtype=torch.int16, low=-127, high=127, fraction_bits=6, block=16)
