"""Device code of the formats in `quark_schemes.formats.floats` and of scales, as Triton functions.

The functions compute the same as `quark_schemes.arithmetic` and `quark_schemes.scale_formats`. They accept
any `FloatShape`.
"""

from __future__ import annotations

import attrs
import triton
import triton.language as tl

from quark.numbers.kernels import DeviceCode
from quark.numbers.kernels.arithmetic import bits_of, bounded, float_of, with_sign_of
from quark_schemes.arithmetic.small_float import FloatShape
from quark_schemes.scale_formats import SMALLEST_SCALE, ScaleRounding

__all__ = ["at_least", "device_code", "encode_small", "round_small", "rounded_scale", "shared_exponent"]


@triton.jit
def round_small(t, SHAPE: tl.constexpr):
    """Round ``t`` half to even to values of a small float. Large values saturate, and NaN stays NaN."""
    low: tl.constexpr = -SHAPE.largest if SHAPE.signed else 0.0
    smallest: tl.constexpr = (1 - SHAPE.bias + 127) << 23  # exponent of the smallest normal number; subnormal numbers have the same spacing
    t = bounded(t, low, SHAPE.largest)
    exponent = tl.maximum(bits_of(t) & 0x7F800000, smallest)
    # 1.5 · 2^(exponent + 23 − mantissa bits): adding it keeps exactly the mantissa bits of the format.
    magic = float_of(exponent + (((23 - SHAPE.mantissa_bits) << 23) | (1 << 22)))
    rounded = (t + magic) - magic
    return with_sign_of(rounded, t) if SHAPE.keeps_signed_zero else rounded


@triton.jit
def encode_small(t, SHAPE: tl.constexpr, NAN_CODE: tl.constexpr):
    """Return the codes of values that a small float represents exactly, as int32.

    NaN becomes ``NAN_CODE``, with the sign bit of the NaN.
    """
    smallest: tl.constexpr = (1 - SHAPE.bias + 127) << 23
    magnitude = bits_of(t) & 0x7FFFFFFF
    normal = (magnitude >> (23 - SHAPE.mantissa_bits)) - ((127 - SHAPE.bias) << SHAPE.mantissa_bits)
    subnormal = (float_of(magnitude) * (1 / SHAPE.smallest)).to(tl.int32)  # in units of the smallest value
    codes = tl.where(magnitude < smallest, subnormal, normal)
    codes = tl.where(magnitude > 0x7F800000, NAN_CODE, codes)
    return codes | (((bits_of(t) >> 31) & 1) << (SHAPE.bits - 1)) if SHAPE.signed else codes


@triton.jit
def at_least(t, smallest):
    """Return ``t.clamp(min=smallest)``, in which NaN stays NaN."""
    return tl.where(t < smallest, smallest, t)


@triton.jit
def shared_exponent(amax, MODE: tl.constexpr, MANTISSA_BITS: tl.constexpr, LARGEST_EXPONENT: tl.constexpr, LARGEST: tl.constexpr):
    """Return the scale of a block, which is a power of two.

    The result is that of `quark_schemes.arithmetic.shared_exponent.shared_exponent_scale`, and the arguments
    have the same meaning.
    """
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
    """Round the scales ``ideal`` as ``S`` describes.

    ``S`` is a `quark_schemes.scale_formats.ScaleRounding`.
    """
    mode: tl.constexpr = S.mode
    shape: tl.constexpr = S.shape
    if mode is not None:
        scale = shared_exponent(ideal, mode, 0, 0, 1.0)
    elif shape is not None:
        scale = at_least(round_small(ideal, shape), shape.smallest)
        scale = tl.where((bits_of(ideal) & 0x7FFFFFFF) < 0x7F800000, scale, ideal)
    elif S.dtype == "float16":
        scale = at_least(ideal, S.smallest).to(tl.float16).to(tl.float32)
    elif S.dtype == "bfloat16":
        scale = at_least(ideal, S.smallest).to(tl.bfloat16).to(tl.float32)
    else:
        scale = ideal
    return scale


@attrs.frozen
class _Parameters:
    """Parameters that the functions below receive as ``P``.

    Attributes:
        mode: How to choose the scale of a group, which is a power of two; None if scales are rounded as
            ``scales`` describes.
    """

    shape: FloatShape
    nan_code: int
    mode: str | None
    scales: ScaleRounding
    smallest_scale: float = SMALLEST_SCALE


@triton.jit
def _round(t, zero, P: tl.constexpr):
    shape: tl.constexpr = P.shape
    return round_small(t, shape)


@triton.jit
def _encode(t, P: tl.constexpr):
    shape: tl.constexpr = P.shape
    return encode_small(t, shape, P.nan_code)


@triton.jit
def _scales(low, high, P: tl.constexpr):
    mode: tl.constexpr = P.mode
    shape: tl.constexpr = P.shape
    formats: tl.constexpr = P.scales
    amax = tl.where(-low > high, -low, high)
    if mode is not None:
        scale = shared_exponent(amax, mode, shape.mantissa_bits, shape.largest_exponent, shape.largest)
    else:
        # The quotient of a subnormal magnitude may be 0, but a scale must be positive.
        ideal = at_least(tl.div_rn(amax, shape.largest), 1.1754943508222875e-38)  # 2^-126
        scale = rounded_scale(tl.where(amax == 0, P.smallest_scale, ideal), formats)
    return scale


def device_code(shape: FloatShape, mode: str | None, scales: ScaleRounding) -> DeviceCode:
    """Return the device code of a small float that rounds half to even.

    Args:
        shape: The format.
        mode: The ``scale_calculation_mode`` if the scales of groups are powers of two; None for other scales.
        scales: Rounding of scales if ``mode`` is None.
    """
    nan_code = shape.nan_codes[-1] if shape.nan_codes else (1 << (shape.bits - shape.signed)) - 1
    return DeviceCode(round=_round, encode=_encode, scales=_scales, parameters=_Parameters(shape, nan_code, mode, scales))
