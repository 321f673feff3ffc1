"""Powers of two as scales of blocks: the choice of the exponent, and its encoding as a byte (E8M0).

Source: OCP Microscaling Formats v1.0, §5.4.1 and §6.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quark.base.scalars import divided
from quark.errors import ConfigError

__all__ = ["MODES", "decode_e8m0", "encode_e8m0", "power_of_two", "shared_exponent_scale"]

MODES = ("even", "floor", "ceil", "rceil")
"""Names of the ways to choose the power of two of an MX block; see `shared_exponent_scale`."""

_BIAS = 127
"""Exponent bias of float32 and of E8M0."""
_MANTISSA = 23
"""Mantissa bits of float32."""


def shared_exponent_scale(amax: Tensor, mode: str, mantissa_bits: int, largest_exponent: int, largest: float = 1.0) -> Tensor:
    """Return the scale of each block: a power of two in ``[2^-127, 2^127]``, as float32.

    Args:
        amax: Largest magnitude of each block, float32, any shape.
        mode: How the exponent is chosen. ``"floor"`` uses the exponent of ``amax``. ``"even"`` first rounds
            ``amax`` to the mantissa bits of the element format. ``"ceil"`` first rounds ``amax`` up to a
            power of two. ``"rceil"`` uses the smallest power of two with which no element saturates.
        mantissa_bits: Mantissa bits of the element format.
        largest_exponent: Exponent of the largest value in the element format, such as 2 for E2M1, whose
            largest value is 6.
        largest: Largest value of the element format. Only mode ``"rceil"`` uses it.

    Raises:
        ConfigError: The mode is unknown.
    """
    if mode not in MODES:
        raise ConfigError(f"scale_calculation_mode={mode!r} is unknown: use one of {', '.join(MODES)}")
    if mode == "rceil":
        amax, mode, largest_exponent = divided(amax, largest), "ceil", 0
    bits = amax.contiguous().view(torch.int32)
    if mode == "even":
        bits = bits + (1 << (_MANTISSA - mantissa_bits - 1))
    elif mode == "ceil":
        bits = bits + ((1 << _MANTISSA) - 1)
    exponent = (bits >> _MANTISSA).sub_(_BIAS + largest_exponent).clamp_(-_BIAS, _BIAS)
    scale = power_of_two(exponent)
    # A block of zeros gets the smallest normal number, as in AMD Quark: processors that flush subnormal
    # numbers can divide by it.
    scale = torch.where(amax == 0, 2.0 ** (1 - _BIAS), scale)
    # Inf and NaN stay in the scale, so that broken blocks stay visible: a power of two cannot express them.
    return torch.where(torch.isfinite(amax), scale, amax)


def power_of_two(exponent: Tensor) -> Tensor:
    """Return ``2^exponent`` as float32 for int32 exponents in [-127, 127].

    The result for the exponent -127 is a subnormal number.
    """
    normal = (exponent + _BIAS) << _MANTISSA
    return torch.where(exponent == -_BIAS, 1 << (_MANTISSA - 1), normal).to(torch.int32).view(torch.float32)


def encode_e8m0(scale: Tensor) -> Tensor:
    """Return the E8M0 bytes of scales. A byte is the scale's exponent + 127, or 255 for NaN."""
    exponent = (scale.contiguous().view(torch.int32) >> _MANTISSA) & 0xFF
    return torch.where(torch.isnan(scale), 0xFF, exponent).to(torch.uint8)


def decode_e8m0(data: Tensor) -> Tensor:
    """Undo `encode_e8m0`: return the float32 scales of E8M0 bytes."""
    scale = power_of_two(data.to(torch.int32) - _BIAS)
    return torch.where(data == 0xFF, torch.nan, scale)
