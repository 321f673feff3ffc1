"""Device code of scales: `quark_schemes.arithmetic.shared_exponent` and `quark_schemes.scale_formats` as Triton functions."""

from __future__ import annotations

import triton
import triton.language as tl

from quark.numbers.kernels.arithmetic import bits_of, float_of
from quark_schemes.kernels.small_floats import round_small

__all__ = ["at_least", "rounded_scale", "shared_exponent"]


@triton.jit
def at_least(t, smallest):
    """Return ``t.clamp(min=smallest)``: NaN stays NaN."""
    return tl.where(t < smallest, smallest, t)


@triton.jit
def shared_exponent(amax, MODE: tl.constexpr, MANTISSA_BITS: tl.constexpr, LARGEST_EXPONENT: tl.constexpr, LARGEST: tl.constexpr):
    """Return the power of two that a block shares: `quark_schemes.arithmetic.shared_exponent.shared_exponent_scale`."""
    if MODE == "rceil":
        amax = tl.div_rn(amax, LARGEST)
        exponent = (bits_of(amax) + 0x7FFFFF) >> 23
    else:
        bits = bits_of(amax)
        if MODE == "even":
            bits = bits + (1 << (23 - MANTISSA_BITS - 1))
        elif MODE == "ceil":
            bits = bits + 0x7FFFFF
        exponent = (bits >> 23) - LARGEST_EXPONENT
    # The exponent with float32's bias: 0 is the lowest, 2^-127, which is a subnormal number.
    exponent = tl.minimum(tl.maximum(exponent, 0), 254)
    scale = float_of(tl.where(exponent == 0, 1 << 22, exponent << 23))
    scale = tl.where(amax == 0, 1.1754943508222875e-38, scale)  # 2^-126
    return tl.where((bits_of(amax) & 0x7FFFFFFF) < 0x7F800000, scale, amax)


@triton.jit
def rounded_scale(ideal, S: tl.constexpr):
    """Return ideal scales rounded to the format of scales that ``S`` is, a `quark_schemes.scale_formats.ScaleRounding`."""
    if S.mode is not None:
        scale = shared_exponent(ideal, S.mode, 0, 0, 1.0)
    elif S.shape is not None:
        scale = at_least(round_small(ideal, S.shape), S.shape.smallest)
        scale = tl.where((bits_of(ideal) & 0x7FFFFFFF) < 0x7F800000, scale, ideal)
    elif S.dtype == "float16":
        scale = at_least(ideal, S.smallest).to(tl.float16).to(tl.float32)
    elif S.dtype == "bfloat16":
        scale = at_least(ideal, S.smallest).to(tl.bfloat16).to(tl.float32)
    else:
        scale = ideal
    return scale
