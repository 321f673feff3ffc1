"""Device code of a third party's format: values are multiples of the scale, rounded towards zero."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def round_toward_zero(t, zero, P: tl.constexpr):
    t = tl.where(t < -P, -P, t)
    t = tl.where(t > P, P, t)
    return tl.where(t < 0, tl.ceil(t), tl.floor(t))


@triton.jit
def scales(low, high, P: tl.constexpr):
    return tl.div_rn(high + (high == 0), P)
