"""Device code of integers, and of block floating point with integer mantissas, as Triton functions.

`quark_schemes.formats.integer` and `quark_schemes.formats.block_float` define these formats.
"""

from __future__ import annotations

import attrs
import triton
import triton.language as tl

from quark.numbers.kernels import DeviceCode
from quark.numbers.kernels.arithmetic import bounded, round_whole
from quark_schemes.kernels.floats import at_least, rounded_scale, shared_exponent
from quark_schemes.scale_formats import SMALLEST_SCALE, ScaleRounding

__all__ = ["block_float_code", "integer_code"]


@attrs.frozen
class _IntegerParameters:
    """The parameter ``P`` of the device functions for integers.

    Attributes:
        zero: ``"none"`` for no zero points, ``"whole"`` for integer zero points, or ``"real"`` for
            floating-point zero points.
    """

    low: float = attrs.field(converter=float)
    high: float = attrs.field(converter=float)
    zero: str
    scales: ScaleRounding
    smallest_scale: float = SMALLEST_SCALE


@triton.jit
def _round_integer(t, zero, P: tl.constexpr):
    # An integer zero point shifts codes but does not change which values are halfway: round them to even
    # before the shift.
    if P.zero == "real":
        t = round_whole(t + zero)
    else:
        t = round_whole(t)
        if zero is not None:
            t = t + zero
    return bounded(t, P.low, P.high)


@triton.jit
def _encode(t, P: tl.constexpr):
    return t.to(tl.int32)


@triton.jit
def _scales_of_integer(low, high, P: tl.constexpr):
    formats: tl.constexpr = P.scales
    if P.zero == "real":
        ideal = tl.div_rn(high - low, P.high - P.low)
        scale = rounded_scale(tl.where(ideal <= P.smallest_scale, 1.0, ideal), formats)
    else:
        low, high = tl.where(low > 0, 0.0, low), at_least(high, 0.0)
        if P.zero == "none":
            ideal = tl.div_rn(tl.where(-low > high, -low, high), (P.high - P.low) / 2)
        else:
            ideal = tl.div_rn(high - low, P.high - P.low)
        scale = rounded_scale(at_least(ideal, P.smallest_scale), formats)
    return scale


@triton.jit
def _zeros(low, scale, P: tl.constexpr):
    if P.zero == "real":
        zero = tl.div_rn(low, -scale)  # Triton's -x is 0 - x, which has no −0
    else:
        zero = bounded(P.low - round_whole(tl.div_rn(tl.where(low > 0, 0.0, low), scale)), P.low, P.high)
    return zero


def integer_code(low: int, high: int, zero: str, scales: ScaleRounding) -> DeviceCode:
    """Return the device code of an integer format that rounds half to even.

    Args:
        low, high: The smallest and the largest code.
        zero: ``"none"`` for no zero points, ``"whole"`` for integer zero points, or ``"real"`` for
            floating-point zero points.
        scales: How scales are rounded.
    """
    zeros = None if zero == "none" else _zeros
    return DeviceCode(
        round=_round_integer, encode=_encode, scales=_scales_of_integer, zeros=zeros, parameters=_IntegerParameters(low, high, zero, scales)
    )


@attrs.frozen
class _BlockFloatParameters:
    """The parameter ``P`` of the device functions for block floating point.

    `quark_schemes.formats.block_float.BlockFloat` describes the attributes. ``unit`` is the value of a
    mantissa's lowest bit if the exponent is 0.
    """

    low: float = attrs.field(converter=float)
    high: float = attrs.field(converter=float)
    unit: float
    mode: str
    even_bits: int
    grows: bool


@triton.jit
def _round_block_float(t, zero, P: tl.constexpr):
    return bounded(round_whole(t), P.low, P.high)


@triton.jit
def _scales_of_block_float(low, high, P: tl.constexpr):
    mode: tl.constexpr = P.mode
    largest: tl.constexpr = P.high * P.unit
    amax = tl.where(-low > high, -low, high)
    scale = shared_exponent(amax, mode, P.even_bits, 0, largest) * P.unit
    scale = at_least(scale, 1.1754943508222875e-38)  # 2^-126
    if P.grows:
        scale = tl.where(round_whole(tl.div_rn(high, scale)) > P.high, scale * 2, scale)
    return scale


def block_float_code(low: int, high: int, fraction_bits: int, mode: str, even_bits: int, grows: bool) -> DeviceCode:
    """Return the device code of a block floating-point format that rounds half to even.

    `quark_schemes.formats.block_float.BlockFloat` describes the arguments.
    """
    return DeviceCode(
        round=_round_block_float,
        encode=_encode,
        scales=_scales_of_block_float,
        parameters=_BlockFloatParameters(low, high, 2.0**-fraction_bits, mode, even_bits, grows),
    )
