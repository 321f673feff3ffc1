"""Device code of `quark_schemes.formats.block_float`."""

from __future__ import annotations

import attrs
import triton
import triton.language as tl

from quark.numbers.kernels import DeviceCode
from quark.numbers.kernels.arithmetic import bounded, round_whole
from quark_schemes.kernels.scales import at_least, shared_exponent

__all__ = ["device_code"]


@attrs.frozen
class _Parameters:
    """P of the functions of this file; attributes as of `quark_schemes.formats.block_float.BlockFloat`, ``unit`` is the last place."""

    low: float
    high: float
    unit: float
    mode: str
    even_bits: int
    grows: bool


@triton.jit
def _round(t, zero, P: tl.constexpr):
    return bounded(round_whole(t), P.low, P.high)


@triton.jit
def _encode(t, P: tl.constexpr):
    return t.to(tl.int32)


@triton.jit
def _scales(low, high, P: tl.constexpr):
    amax = tl.where(-low > high, -low, high)
    scale = shared_exponent(amax, P.mode, P.even_bits, 0, P.high * P.unit) * P.unit
    scale = at_least(scale, 1.1754943508222875e-38)  # 2^-126
    if P.grows:
        scale = tl.where(round_whole(tl.div_rn(high, scale)) > P.high, scale * 2, scale)
    return scale


def device_code(low: int, high: int, fraction_bits: int, mode: str, even_bits: int, grows: bool) -> DeviceCode:
    """Return the device code of block floating point, rounding half to even; arguments as of `BlockFloat`."""
    return DeviceCode(
        round=_round, encode=_encode, scales=_scales, parameters=_Parameters(low, high, 2.0**-fraction_bits, mode, even_bits, grows)
    )
