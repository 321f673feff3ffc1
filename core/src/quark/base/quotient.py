"""Quotients of tensors by numbers, the same on every device."""

from __future__ import annotations

from torch import Tensor

__all__ = ["divided"]


def divided(x: Tensor, number: float) -> Tensor:
    """Return ``x / number``, rounded once.

    CUDA computes ``x / number`` as ``x · (1 / number)`` where the host has the number, so that the last bit
    may differ. Here the device has it.

    Args:
        x: Of a floating-point dtype, in which the quotient is computed.
        number: The divisor, rounded to that dtype.
    """
    return x / (number if x.device.type == "cpu" else x.new_full((), number))
