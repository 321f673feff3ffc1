"""Triton kernels that round a tensor in one pass; the device code of formats, and devices that use it.

`quark.numbers.kernels` imports no Triton: the modules that hold kernels are imported when a tensor on a
device that uses them is first rounded.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import attrs
import torch

__all__ = ["VARIABLE", "DeviceCode", "DeviceFunction", "Runs", "launching_on", "uses_kernels"]

DeviceFunction = Callable[..., Any]
"""A function under ``triton.jit`` that is called by a kernel."""


@attrs.frozen(kw_only=True)
class DeviceCode:
    """The arithmetic of a number format for one element, as functions under ``triton.jit``.

    They work on tiles, which are float32 and of any shape, and give the bits that the methods of
    `quark.numbers.NumberFormat` give on a CPU. Kernels are compiled without contraction of products and sums.
    Two more things keep bits equal: division is ``tl.div_rn``, and bounds are ``tl.where(t < low, low, t)``,
    which keeps NaN and the sign of zero on every device. Values of codes of a byte need no function: a table
    holds them, which `quark.numbers.NumberFormat.decode` fills once.

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


VARIABLE = "QUARK_KERNELS"
"""Environment variable with the device types that use kernels, separated by commas.

Where it is not set, ``cuda`` (AMD's GPUs too); where it is empty, none.
"""
_DEFAULT = "cuda"


def uses_kernels(device: torch.device) -> bool:
    """Return whether tensors on that device are rounded by kernels, if their format has device code.

    With ``QUARK_KERNELS=cpu`` and ``TRITON_INTERPRET=1`` the kernels run on the CPU, in Triton's interpreter,
    as tests do. What ``torch.compile`` traces has none: the compiler fuses torch's operations.
    """
    return not torch.compiler.is_compiling() and device.type in _types(os.environ.get(VARIABLE, _DEFAULT))


@lru_cache(maxsize=16)
def _types(named: str) -> frozenset[str]:
    """Return the device types of a value of the variable; none where there is no Triton."""
    types = frozenset(name.strip() for name in named.split(",") if name.strip())
    return types if types and importlib.util.find_spec("triton") is not None else frozenset()


def launching_on(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which kernels are launched on that device.

    Triton takes the current device, wherever its arguments lie.
    """
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)


@attrs.frozen
class Runs:
    """How the elements that share a scale lie in a contiguous tensor.

    Run r has scale number ``r // span · period + r % period``.

    Attributes:
        length: Elements of a run, next to each other.
        period: Runs until scales begin again, or go on to others.
        span: Runs after which they go on to others, a multiple of ``period``.
    """

    length: int
    period: int = 1
    span: int = 1

    @property
    def have_own_scales(self) -> bool:
        """Whether run r has scale number r."""
        return self.period == self.span
