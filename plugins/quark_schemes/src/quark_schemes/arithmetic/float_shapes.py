"""The small floats: exponent, mantissa, bias and special codes of each.

Source: OCP 8-bit Floating Point Specification v1.0; OCP Microscaling Formats v1.0.
"""

from __future__ import annotations

import math

import attrs

__all__ = ["E2M1", "E2M3", "E3M2", "E4M3", "E5M2", "E5M3", "FLOAT32_BIAS", "FLOAT32_MANTISSA", "FloatShape"]

FLOAT32_BIAS = 127
FLOAT32_MANTISSA = 23


@attrs.frozen(kw_only=True)
class FloatShape:
    """The layout of a small float.

    Attributes:
        exponent_bits, mantissa_bits, bias: Of the format.
        largest: Largest finite value, to which larger ones saturate.
        signed: Whether there is a sign bit; without, negative values become 0.
        keeps_signed_zero: Whether −0, and small negative values that round to it, stay −0.
        nan_codes, infinite_codes: Codes of positive sign that are no numbers.
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
        """Bits of one code."""
        return self.exponent_bits + self.mantissa_bits + self.signed

    @property
    def largest_exponent(self) -> int:
        """Exponent of the largest value."""
        return math.frexp(self.largest)[1] - 1

    @property
    def smallest(self) -> float:
        """The smallest positive value, a subnormal number."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    @property
    def to_own_exponents(self) -> float:
        """Factor that puts this format's exponents where float32 has its own."""
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
