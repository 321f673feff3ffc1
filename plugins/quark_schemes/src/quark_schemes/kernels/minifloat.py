"""Device code of `quark_schemes.formats.minifloat`."""

from __future__ import annotations

import attrs
import triton
import triton.language as tl

from quark.numbers.kernels import DeviceCode
from quark_schemes.arithmetic.float_shapes import FloatShape
from quark_schemes.kernels.scales import at_least, rounded_scale, shared_exponent
from quark_schemes.kernels.small_floats import encode_small, round_small
from quark_schemes.scale_formats import SMALLEST_SCALE, ScaleRounding

__all__ = ["device_code"]


@attrs.frozen
class _Parameters:
    """P of the functions of this file: the format, the code of its NaN, and how scales are found.

    Attributes:
        mode: Of the power of two that a group shares; None for scales in the format ``scales``.
    """

    shape: FloatShape
    nan_code: int
    mode: str | None
    scales: ScaleRounding
    smallest_scale: float = SMALLEST_SCALE


@triton.jit
def _round(t, zero, P: tl.constexpr):
    return round_small(t, P.shape)


@triton.jit
def _encode(t, P: tl.constexpr):
    return encode_small(t, P.shape, P.nan_code)


@triton.jit
def _scales(low, high, P: tl.constexpr):
    amax = tl.where(-low > high, -low, high)
    if P.mode is not None:
        scale = shared_exponent(amax, P.mode, P.shape.mantissa_bits, P.shape.largest_exponent, P.shape.largest)
    else:
        # The quotient of a subnormal magnitude may be 0, which is no scale.
        ideal = at_least(tl.div_rn(amax, P.shape.largest), 1.1754943508222875e-38)  # 2^-126
        scale = rounded_scale(tl.where(amax == 0, P.smallest_scale, ideal), P.scales)
    return scale


def device_code(shape: FloatShape, mode: str | None, scales: ScaleRounding) -> DeviceCode:
    """Return the device code of a small float, rounding half to even.

    Args:
        shape: The format.
        mode: ``scale_calculation_mode`` of power-of-two scales that groups share; None for other scales.
        scales: The format of these.
    """
    nan_code = shape.nan_codes[-1] if shape.nan_codes else (1 << (shape.bits - shape.signed)) - 1
    return DeviceCode(round=_round, encode=_encode, scales=_scales, parameters=_Parameters(shape, nan_code, mode, scales))
