"""Scalars and tensors: quotients that all devices round alike, and several numbers read at once."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def divided(x: Tensor, number: float) -> Tensor:
    """Return ``x / number``, rounded once.

    If the number is on the host, CUDA computes ``x · (1 / number)``, whose last bit may differ. Here the
    number is on the device.

    Args:
        x: Tensor of a floating-point dtype, in which the quotient is computed.
        number: The divisor, rounded to that dtype.
    """
    return x / (number if x.device.type == "cpu" else x.new_full((), number))


def numbers(*tensors: Tensor) -> list[float]:
    """Return the values of scalar tensors of one device; the host waits for the device once.

    Each read waits until everything before it is computed. Give at least one tensor.

    Args:
        tensors: Scalars of any real dtype; truth values become 0 and 1.

    Example:
        >>> numbers(torch.tensor(2), torch.tensor(0.5), torch.tensor(True))
        [2.0, 0.5, 1.0]
    """
    return torch.stack([tensor.detach().to(torch.float64) for tensor in tensors]).tolist()


def decibels(signal: float, noise: float) -> float | None:
    """Return 10 log10(signal ÷ noise) in dB.

    None if that is not a finite number: without noise, or without signal.

    >>> decibels(100.0, 1.0), decibels(1.0, 0.0)
    (20.0, None)
    """
    if not (signal > 0 and noise > 0 and math.isfinite(signal) and math.isfinite(noise)):
        return None
    return 10 * math.log10(signal / noise)
