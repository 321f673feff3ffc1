"""Arithmetic functions that the device code of several formats uses.

They handle the bits of float32 values, whole numbers and bounds. All functions preserve NaN and the sign of
zero.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bits_of(t):
    """Return the bits of float32 values as int32 values."""
    return t.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """Return the float32 values whose bits are the int32 values ``bits``."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def with_sign_of(magnitude, t):
    """Return ``magnitude`` with the signs of ``t``, like ``torch.copysign``."""
    return float_of((bits_of(magnitude) & 0x7FFFFFFF) | (bits_of(t) & -0x80000000))


@triton.jit
def bounded(t, low, high):
    """Limit ``t`` to the range from ``low`` to ``high``, like ``torch.clamp`` on CPUs.

    NaN stays NaN, and −0 stays −0 at a bound of 0.
    """
    t = tl.where(t < low, low, t)
    return tl.where(t > high, high, t)


@triton.jit
def round_whole(t):
    """Round ``t`` to whole numbers, and ties to even numbers, like ``torch.round``.

    This is exact for magnitudes up to 2^22. For larger magnitudes, the magnitude of the result is above 2^22.
    """
    # Adding 1.5 · 2^23 leaves the whole part, rounded as the processor rounds sums. The compiler must not
    # reassociate this, and does not.
    return with_sign_of((t + 12582912.0) - 12582912.0, t)
