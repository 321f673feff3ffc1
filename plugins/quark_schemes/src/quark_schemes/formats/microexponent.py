"""Shared microexponents, MX6 and MX9: block floating point in which a pair whose two values are small has a step half as wide.

A block shares an exponent E, each pair of neighbours one bit more: it is set where both values lie below 2^E.
An element is a sign and four (MX6) or seven (MX9) bits: six or nine bits in all with a sixteenth of the
exponent and half of the pair's bit.

In a checkpoint a block is its mantissas in two's complement, packed little endian, then the pairs' bits, the
first in the lowest place; the exponents, E + 127, are the scales. Source: Darvish Rouhani et al., arXiv
2302.08007; AMD Quark 0.13 (MX6, MX9).
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from quark.config.enums import RoundType
from quark.config.tensor import QTensorConfig
from quark.numbers import Packing
from quark.numbers.kernels import DeviceCode
from quark_schemes.arithmetic.whole_numbers import WHOLE_ROUNDINGS
from quark_schemes.formats.block_float import BlockFloat
from quark_schemes.packing.shared_exponents import PAIR_BITS, MicroexponentPacking

__all__ = ["MX6", "MX9", "Microexponent"]

_ONE_EXPONENT = 1 << 23
_MAGNITUDE = 0x7FFFFFFF


def _bits(value: float) -> int:
    """Return the float32 bits of a number."""
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))


@attrs.frozen(kw_only=True)
class Microexponent(BlockFloat):
    """Block floating point with a bit of exponent for each pair along the last axis, which therefore has an even length.

    A code holds the mantissa above the pair's bit: ``2 · mantissa + bit``.
    """

    packing: Packing = attrs.field(
        default=attrs.Factory(lambda self: MicroexponentPacking(self.fraction_bits, self.high.bit_length() + 1), takes_self=True)
    )

    @property
    def _limit(self) -> float:
        """The step of a pair is halved where both of its values are below this, in units of the wider step."""
        return float(1 << self.fraction_bits)

    def spec_error(self, spec: QTensorConfig) -> str | None:
        if spec.group_size is None or spec.group_size % (2 * PAIR_BITS):
            return f"{self.name} has blocks of a multiple of 16, not {spec.group_size}: use 16 or 32"
        return super().spec_error(spec)

    def device_code(self, spec: QTensorConfig) -> DeviceCode | None:
        return None  # neighbours decide together; `element_format` has device code

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
        """Return int32, shaped as ``t``: float32 bits that count for one exponent where the step is halved, else 0."""
        below = t.view(torch.int32).bitwise_and(_MAGNITUDE).sub_(_bits(self._limit))
        # Two neighbours as one 64-bit number: the AND of both sign bits, moved to bit 0 and spread.
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


MX6 = Microexponent(name="mx6", bits=5.5, storage_dtype=torch.int16, low=-15, high=15, fraction_bits=3, block=16)
MX9 = Microexponent(name="mx9", bits=8.5, storage_dtype=torch.int16, low=-127, high=127, fraction_bits=6, block=16)
