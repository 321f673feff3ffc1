"""Triton kernels that round a tensor in one pass, the device code of formats, and the choice of devices that
use kernels.

`quark.numbers.kernels` imports no Triton. The modules with kernels are imported when a tensor is first
rounded on a device that uses them.
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
"""A function under ``triton.jit`` that a kernel calls."""


@attrs.frozen(kw_only=True)
class DeviceCode:
    """The arithmetic of a number format for one element, as functions under ``triton.jit``.

    They work on float32 tiles of any shape, and give the same bits as the methods of
    `quark.numbers.NumberFormat` on a CPU. Kernels are compiled without contraction of products and sums. To
    keep bits equal, write division as ``tl.div_rn``, and bounds as ``tl.where(t < low, low, t)``, which keeps
    NaN and the sign of zero on every device. Give an attribute of a constant a name before you pass it to
    another function, ``shape: tl.constexpr = P.shape``: Triton before 3.7 takes only names as constants.
    One-byte codes need no function for their values: `quark.numbers.NumberFormat.decode` fills a table of
    them once.

    Attributes:
        round: ``(t, zero, P) → t``, as `quark.numbers.NumberFormat.round_`; ``zero`` is None, or float32 that
            can be broadcast.
        encode: ``(t, P) → codes``, as `quark.numbers.NumberFormat.encode`: int32, whose lowest bits are
            stored. None if torch computes codes.
        scales: ``(low, high, P) → scale``, as `quark.numbers.NumberFormat.qparams`, float32. None if torch
            computes scales.
        zeros: ``(low, scale, P) → zero``, float32, for specs with zero points; else None.
        parameters: P, an argument of each function: any frozen object whose ``repr`` shows its whole content.
            It is a constant of the compiled kernel; so are its attributes.
    """

    round: DeviceFunction
    encode: DeviceFunction | None = None
    scales: DeviceFunction | None = None
    zeros: DeviceFunction | None = None
    parameters: Any = None


VARIABLE = "QUARK_KERNELS"
"""Environment variable with the device types that use kernels, separated by commas.

If the variable is not set, ``cuda`` devices use kernels, which includes AMD's GPUs. If it is empty, no device
does.
"""
_DEFAULT = "cuda"

OLDEST_TRITON = "3.4"
"""The first release of Triton that compiles the kernels."""


def uses_kernels(device: torch.device) -> bool:
    """Return whether tensors on that device are rounded by kernels, if their format has device code.

    With ``QUARK_KERNELS=cpu`` and ``TRITON_INTERPRET=1`` the kernels run on the CPU, in Triton's interpreter,
    as in tests. Code traced by ``torch.compile`` uses no kernels: the compiler fuses torch's operations.
    Torch's operations also round if Triton is missing or older than `OLDEST_TRITON`.
    """
    if torch.compiler.is_compiling() or device.type not in _types(os.environ.get(VARIABLE, _DEFAULT)):
        return False
    return _has_triton()


@lru_cache(maxsize=16)
def _types(named: str) -> frozenset[str]:
    """Return the device types in a value of `VARIABLE`."""
    return frozenset(name.strip() for name in named.split(",") if name.strip())


@cache
def _has_triton() -> bool:
    """Return whether the installed Triton can compile the kernels. If it cannot, log the reason."""
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
        f"{reason}: PyTorch operations replace the kernels, with the same values but slower. Install Triton {OLDEST_TRITON} or newer"
    )
    return False


def launching_on(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which kernels are launched on ``device``.

    Without it, Triton would use the current device, even if the arguments are on another device.
    """
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)


@attrs.frozen
class Runs:
    """Positions of the elements that share a scale in a contiguous tensor.

    Run r has scale number ``r // span · period + r % period``.

    Attributes:
        length: Number of adjacent elements in a run.
        period: Number of consecutive runs that have different scales.
        span: Number of consecutive runs that use the same ``period`` scales in turn, a multiple of it.
    """

    length: int
    period: int = 1
    span: int = 1

    @property
    def have_own_scales(self) -> bool:
        """Whether each run has its own scale, in the order of runs."""
        return self.period == self.span
