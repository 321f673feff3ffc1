"""Arithmetic that device code shares: bits of float32, whole numbers, bounds.

All functions keep NaN and the sign of zero.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bits_of(t):
    """Return the bits of float32 values, int32."""
    return t.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """Return the float32 values of bits, int32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def with_sign_of(magnitude, t):
    """Return ``magnitude`` with the signs of ``t``: ``torch.copysign``."""
    return float_of((bits_of(magnitude) & 0x7FFFFFFF) | (bits_of(t) & -0x80000000))


@triton.jit
def bounded(t, low, high):
    """Return ``t`` between two bounds, as ``torch.clamp`` on CPUs.

    NaN stays NaN, and −0 stays −0 at a bound of 0.
    """
    t = tl.where(t < low, low, t)
    return tl.where(t > high, high, t)


@triton.jit
def round_whole(t):
    """Return ``t`` rounded to whole numbers, half to even, for magnitudes up to 2^22: ``torch.round``.

    Larger magnitudes give results above 2^22.
    """
    # Adding 1.5 · 2^23 leaves the whole part, rounded as the processor rounds sums. The compiler must not
    # reassociate this, and does not.
    return with_sign_of((t + 12582912.0) - 12582912.0, t)
