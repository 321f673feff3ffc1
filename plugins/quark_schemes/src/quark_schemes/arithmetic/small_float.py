"""Pure functions that round to small floats, encode them and decode them.

A `FloatShape` is the layout of a small float. To round a value, the functions add a large power of two and
subtract it again. The processor rounds the sum half to even, so the result has only the mantissa bits of the
format. To encode a value, the functions look up the code in a table, whose index is the upper half of the
float32 value. This is faster than arithmetic, because arithmetic on subnormal numbers is fifty times slower
than on normal ones.

Source: OCP 8-bit Floating Point Specification v1.0; OCP Microscaling Formats v1.0.
"""

from __future__ import annotations

import math
from functools import lru_cache

import attrs
import torch
from torch import Tensor

__all__ = [
    "E2M1",
    "E2M3",
    "E3M2",
    "E4M3",
    "E5M2",
    "E5M3",
    "FLOAT32_BIAS",
    "FLOAT32_MANTISSA",
    "FloatShape",
    "decode_small",
    "encode_small",
    "round_small_",
]


FLOAT32_BIAS = 127
FLOAT32_MANTISSA = 23


@attrs.frozen(kw_only=True)
class FloatShape:
    """The layout of a small float.

    Attributes:
        exponent_bits, mantissa_bits, bias: Number of exponent bits, number of mantissa bits, and exponent
            bias of the format.
        largest: Largest finite value. Larger values saturate to it.
        signed: Whether codes have a sign bit. Without a sign bit, negative values become 0.
        keeps_signed_zero: Whether −0 stays −0, and small negative values are rounded to −0.
        nan_codes, infinite_codes: Codes of NaN and of infinity, without the sign bit.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float
    signed: bool = True
    keeps_signed_zero: bool = False
    nan_codes: tuple[int, ...] = ()
    infinite_codes: tuple[int, ...] = ()

    @property
    def bits(self) -> int:
        """The number of bits in a code."""
        return self.exponent_bits + self.mantissa_bits + self.signed

    @property
    def largest_exponent(self) -> int:
        """The exponent of the largest value."""
        return math.frexp(self.largest)[1] - 1

    @property
    def smallest(self) -> float:
        """The smallest positive value, a subnormal number."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    @property
    def to_own_exponents(self) -> float:
        """The factor that converts from this format's exponent bias to float32's."""
        return 2.0 ** (self.bias - FLOAT32_BIAS)


E4M3 = FloatShape(exponent_bits=4, mantissa_bits=3, bias=7, largest=448.0, keeps_signed_zero=True, nan_codes=(0x7F,))
E5M2 = FloatShape(
    exponent_bits=5,
    mantissa_bits=2,
    bias=15,
    largest=57344.0,
    keeps_signed_zero=True,
    nan_codes=(0x7D, 0x7E, 0x7F),
    infinite_codes=(0x7C,),
)
E5M3 = FloatShape(exponent_bits=5, mantissa_bits=3, bias=15, largest=114688.0, signed=False, nan_codes=(0xFF,))
E3M2 = FloatShape(exponent_bits=3, mantissa_bits=2, bias=3, largest=28.0)
E2M3 = FloatShape(exponent_bits=2, mantissa_bits=3, bias=1, largest=7.5)
E2M1 = FloatShape(exponent_bits=2, mantissa_bits=1, bias=1, largest=6.0)


_EXPONENT = 0x7F800000


def round_small_(t: Tensor, shape: FloatShape) -> Tensor:
    """Round float32 values in place to the nearest values of ``shape``; return ``t``.

    A value halfway between two neighbours becomes the one with an even code. Values out of range saturate,
    and NaN stays NaN.

    Args:
        t: Values, any shape.
        shape: The format.
    """
    t.clamp_(-shape.largest if shape.signed else 0.0, shape.largest)
    exponent = _spacing_exponent(t, shape)
    # 1.5 · 2^(exponent + 23 − mantissa bits): adding it keeps exactly the mantissa bits of the format.
    magic = exponent.add_(((FLOAT32_MANTISSA - shape.mantissa_bits) << FLOAT32_MANTISSA) | (1 << (FLOAT32_MANTISSA - 1)))
    offset = magic.view(torch.float32)
    if not shape.keeps_signed_zero:
        return t.add_(offset).sub_(offset)
    rounded = torch.add(t, offset).sub_(offset)
    return torch.copysign(rounded, t, out=t)


def _spacing_exponent(t: Tensor, shape: FloatShape) -> Tensor:
    """Return the float32 exponent field of each value, or of the smallest normal number if that is larger.

    ``shape`` defines the smallest normal number. Neighbouring subnormal numbers have the same distance as
    those at the smallest normal number.
    """
    smallest = (1 - shape.bias + FLOAT32_BIAS) << FLOAT32_MANTISSA
    return t.view(torch.int32).bitwise_and(_EXPONENT).clamp_(min=smallest)


def encode_small(t: Tensor, shape: FloatShape, *, is_rounded: bool = True, out: Tensor | None = None) -> Tensor:
    """Return the uint8 codes of the float32 or bfloat16 values ``t``, without changing ``t``.

    Args:
        t: Values, any shape. NaN gets the first code of NaN. If the format has no code of NaN, NaN gets the
            code of the largest value.
        shape: The format.
        is_rounded: Whether the format has a code for each value, so that rounding is not needed; −0 then
            keeps its sign. Otherwise, the values are rounded as in `round_small_`.
        out: Optional tensor that receives the codes. It must be contiguous and have the shape of ``t``.
    """
    # The upper half of a float32 has enough mantissa bits for the format and for its halfway values. It
    # therefore decides the code, if its last bit is set whenever the lower half is not 0 (rounding to odd). A
    # bfloat16 is such an upper half.
    if t.dtype is torch.bfloat16:
        upper = t.contiguous().view(torch.int16).to(torch.int32)
    else:
        bits = t.contiguous().view(torch.int32)
        upper = bits.bitwise_and(0xFFFF).add_(0xFFFF).bitwise_or_(bits).bitwise_right_shift_(16)
    result = torch.empty(t.shape, dtype=torch.uint8, device=t.device) if out is None else out
    torch.index_select(_code_table(shape, is_rounded, t.device), 0, upper.add_(1 << 15).view(-1), out=result.view(-1))
    return result


def decode_small(codes: Tensor, shape: FloatShape) -> Tensor:
    """Undo `encode_small`: return the float32 values of uint8 codes.

    If the format has codes of NaN or infinity, these become NaN or infinity.
    """
    if shape.nan_codes and _may_be_special(codes, shape):
        return torch.index_select(_table(shape, codes.device), 0, codes.reshape(-1).long()).reshape(codes.shape)
    return _decode_numbers(codes, shape)


def _may_be_special(codes: Tensor, shape: FloatShape) -> bool:
    """Return whether ``codes`` may contain codes of NaN or infinity.

    On other devices than the CPU, return True without a test, because a test would wait for the device.
    """
    if codes.device.type != "cpu" or codes.numel() == 0:
        return True
    magnitudes = codes.bitwise_and((1 << (shape.bits - shape.signed)) - 1)
    return int(magnitudes.amax()) >= min(*shape.nan_codes, *shape.infinite_codes, 1 << shape.bits)


def _decode_numbers(codes: Tensor, shape: FloatShape) -> Tensor:
    bits, place = codes.to(torch.int32), FLOAT32_MANTISSA - shape.mantissa_bits
    if not shape.signed:
        bits.bitwise_left_shift_(place)
    else:
        # Shift left to the sign bit, then right to float32's exponent and mantissa. Clear the copies of the
        # sign bit.
        magnitude_bits = shape.bits - 1
        up = 31 - magnitude_bits
        bits.bitwise_left_shift_(up).bitwise_right_shift_(up - place)
        bits.bitwise_and_(-(1 << 31) | ((1 << magnitude_bits) - 1) << place)
    return bits.view(torch.float32).mul_(1 / shape.to_own_exponents)


@lru_cache(maxsize=32)
def _code_table(shape: FloatShape, is_rounded: bool, device: torch.device) -> Tensor:
    """Return the codes of all float32 values whose 16 lower bits are 0, as uint8 ``[65536]``.

    The values are in ascending order of their bits as int32.
    """
    values = (torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16).view(torch.float32)
    rounded = values if is_rounded else round_small_(values.clone(), shape)
    # Codes without their sign bit have the same order as their values; the codes of NaN and infinity come
    # last.
    magnitudes = _decode_numbers(torch.arange(1 << (shape.bits - shape.signed), dtype=torch.uint8), shape)
    codes = torch.searchsorted(magnitudes, rounded.abs()).clamp_(max=len(magnitudes) - 1).to(torch.uint8)
    if shape.signed:
        codes.bitwise_or_(rounded.signbit().to(torch.uint8) << (shape.bits - 1))
    return (codes.masked_fill_(values.isnan(), shape.nan_codes[0]) if shape.nan_codes else codes).to(device)


@lru_cache(maxsize=16)
def _table(shape: FloatShape, device: torch.device) -> Tensor:
    """Return the values of all codes, in the order of the codes."""
    values = _decode_numbers(torch.arange(1 << shape.bits, dtype=torch.uint8), shape)
    for codes, value in ((shape.nan_codes, torch.nan), (shape.infinite_codes, torch.inf)):
        for code in codes:
            values[code] = value
            if shape.signed:
                values[code | 1 << (shape.bits - 1)] = -value
    return values.to(device)
