"""DeviceCode: the arithmetic of a number format as Triton functions, which kernels inline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

__all__ = ["DeviceCode", "DeviceFunction"]

DeviceFunction = Callable[..., Any]
"""A function under ``triton.jit`` that is called by a kernel."""


@attrs.frozen(kw_only=True)
class DeviceCode:
    """What a number format does to one element, as functions under ``triton.jit``.

    They work on tiles, which are float32 and of any shape, and give the bits that the methods of
    `quark.numbers.NumberFormat` give on a CPU. Kernels are compiled without contraction of products and sums.
    Two more things keep bits equal: division is ``tl.div_rn``, and bounds are ``tl.where(t < low, low, t)``,
    which keeps NaN and the sign of zero on every device.

    Attributes:
        round: ``(t, zero, P) → t``, as `quark.numbers.NumberFormat.round_`; ``zero`` is None, or float32 that
            can be broadcast.
        encode: ``(t, P) → codes``, as `quark.numbers.NumberFormat.encode`: int32, of which the lowest bits
            are stored. None where codes are left to torch.
        scales: ``(low, high, P) → scale``, as `quark.numbers.NumberFormat.qparams`, float32. None where
            scales are left to torch.
        zeros: ``(low, scale, P) → zero``, float32, for specs with zero points; None without.
        parameters: P, which each of them is given: any frozen object whose ``repr`` says all that it holds.
            It is a constant of the compiled kernel; so are its attributes.
    """

    round: DeviceFunction
    encode: DeviceFunction | None = None
    scales: DeviceFunction | None = None
    zeros: DeviceFunction | None = None
    parameters: Any = None
