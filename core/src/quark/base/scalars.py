"""Functions for scalars and tensors. One divides with the same rounding on all devices, one reads several
numbers from a device at once, and one computes decibels."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def divided(x: Tensor, number: float) -> Tensor:
    """Return the correctly rounded quotient ``x / number``.

    For a divisor that is a Python number, CUDA computes ``x · (1 / number)``, which may differ from the
    quotient in the last bit. So this function first copies ``number`` to the device of ``x``.

    Args:
        x: A floating-point tensor. The quotient is computed in its dtype.
        number: The divisor. It is rounded to the dtype of ``x``.
    """
    return x / (number if x.device.type == "cpu" else x.new_full((), number))


def numbers(*tensors: Tensor) -> list[float]:
    """Return the values of scalar tensors that are on one device. Pass at least one tensor.

    The host waits for the device only once. If it read each tensor separately, it would wait for each one.

    Args:
        tensors: Scalars of any real dtype. Booleans become 0 and 1.

    Example:
        >>> numbers(torch.tensor(2), torch.tensor(0.5), torch.tensor(True))
        [2.0, 0.5, 1.0]
    """
    return torch.stack([tensor.detach().to(torch.float64) for tensor in tensors]).tolist()


def decibels(signal: float, noise: float) -> float | None:
    """Return 10 log10(signal ÷ noise) in dB.

    The result is None if the signal or the noise is not positive and finite.

    >>> decibels(100.0, 1.0), decibels(1.0, 0.0)
    (20.0, None)
    """
    if not (signal > 0 and noise > 0 and math.isfinite(signal) and math.isfinite(noise)):
        return None
    return 10 * math.log10(signal / noise)
