"""Device code of small floats: `quark_schemes.arithmetic.small_float` as Triton functions, for any `FloatShape`."""

from __future__ import annotations

import triton
import triton.language as tl

from quark.numbers.kernels.arithmetic import bits_of, bounded, float_of, with_sign_of

__all__ = ["encode_small", "round_small"]


@triton.jit
def round_small(t, SHAPE: tl.constexpr):
    """Return ``t`` rounded to values of a small float, half to even, saturating; NaN stays NaN."""
    low: tl.constexpr = -SHAPE.largest if SHAPE.signed else 0.0
    smallest: tl.constexpr = (1 - SHAPE.bias + 127) << 23  # exponent of the smallest normal number: subnormal ones share its spacing
    t = bounded(t, low, SHAPE.largest)
    exponent = tl.maximum(bits_of(t) & 0x7F800000, smallest)
    # 1.5 · 2^(exponent + 23 − mantissa bits): adding it keeps exactly the mantissa bits of the format.
    magic = float_of(exponent + (((23 - SHAPE.mantissa_bits) << 23) | (1 << 22)))
    rounded = (t + magic) - magic
    return with_sign_of(rounded, t) if SHAPE.keeps_signed_zero else rounded


@triton.jit
def encode_small(t, SHAPE: tl.constexpr, NAN_CODE: tl.constexpr):
    """Return the codes, int32, of values of a small float; NaN has the code ``NAN_CODE`` and its sign."""
    smallest: tl.constexpr = (1 - SHAPE.bias + 127) << 23
    magnitude = bits_of(t) & 0x7FFFFFFF
    normal = (magnitude >> (23 - SHAPE.mantissa_bits)) - ((127 - SHAPE.bias) << SHAPE.mantissa_bits)
    subnormal = (float_of(magnitude) * (1 / SHAPE.smallest)).to(tl.int32)  # in units of the smallest value
    codes = tl.where(magnitude < smallest, subnormal, normal)
    codes = tl.where(magnitude > 0x7F800000, NAN_CODE, codes)
    return codes | (((bits_of(t) >> 31) & 1) << (SHAPE.bits - 1)) if SHAPE.signed else codes
