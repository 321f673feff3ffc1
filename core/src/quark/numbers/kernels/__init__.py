"""Triton kernels that round a tensor in one pass; the device code of formats, and devices that use it.

`quark.numbers.kernels` imports no Triton: the modules that hold kernels are imported when a tensor on a
device that uses them is first rounded.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import Any

import attrs
import torch
from packaging.version import Version

from quark.base.log import get_logger

DeviceFunction = Callable[..., Any]
"""A function under ``triton.jit`` that is called by a kernel."""


@attrs.frozen(kw_only=True)
class DeviceCode:
    """The arithmetic of a number format for one element, as functions under ``triton.jit``.

    They work on tiles, which are float32 and of any shape, and give the bits that the methods of
    `quark.numbers.NumberFormat` give on a CPU. Kernels are compiled without contraction of products and sums.
    Two more things keep bits equal: division is ``tl.div_rn``, and bounds are ``tl.where(t < low, low, t)``,
    which keeps NaN and the sign of zero on every device. An attribute of a constant that is handed to another
    function gets a name first, ``shape: tl.constexpr = P.shape``: Triton before 3.7 takes only names as
    constants. Values of codes of a byte need no function: a table holds them, which
    `quark.numbers.NumberFormat.decode` fills once.

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

OLDEST_TRITON = "3.4"
"""The first release of Triton that compiles the kernels."""


def uses_kernels(device: torch.device) -> bool:
    """Return whether tensors on that device are rounded by kernels, if their format has device code.

    With ``QUARK_KERNELS=cpu`` and ``TRITON_INTERPRET=1`` the kernels run on the CPU, in Triton's interpreter,
    as tests do. What ``torch.compile`` traces has none: the compiler fuses torch's operations. Torch's
    operations round too if there is no Triton, or one before `OLDEST_TRITON`.
    """
    if torch.compiler.is_compiling() or device.type not in _types(os.environ.get(VARIABLE, _DEFAULT)):
        return False
    return _has_triton()


@lru_cache(maxsize=16)
def _types(named: str) -> frozenset[str]:
    """Return the device types of a value of the variable."""
    return frozenset(name.strip() for name in named.split(",") if name.strip())


@cache
def _has_triton() -> bool:
    """Return whether the installed Triton compiles the kernels; say in the log why it does not."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        version = Version(importlib.import_module("triton").__version__)
    except Exception as error:  # a broken installation may raise anything
        reason = f"Triton cannot be imported ({error})"
    else:
        if version >= Version(OLDEST_TRITON):
            return True
        reason = f"Triton {version} is too old for the kernels"
    get_logger(__name__).warning(
        f"{reason}: torch's operations take their place, which is slower and gives the same values. Install Triton {OLDEST_TRITON} or newer"
    )
    return False


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
