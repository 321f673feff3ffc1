"""Triton kernels that round a tensor in one pass, the device code of formats, and the choice of devices that
use kernels.

`quark.numbers.kernels` does not import Triton. The modules with kernels are imported when a tensor is first
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
    """The arithmetic of a number format for one element, as functions decorated with ``triton.jit``.

    The functions work on float32 tiles of any shape. They give the same bits as the methods of
    `quark.numbers.NumberFormat` on a CPU. Kernels are compiled without fused multiply-add. To get equal bits,
    write division as ``tl.div_rn``, and write bounds as ``tl.where(t < low, low, t)``. This expression
    preserves NaN and the sign of zero on every device. Before you pass an attribute of a constant to another
    function, assign it to a name: ``shape: tl.constexpr = P.shape``. Triton before 3.7 accepts only names as
    constants. No function decodes one-byte codes. The kernel reads their values from a table that
    `quark.numbers.NumberFormat.decode` fills once.

    Attributes:
        round: The function ``(t, zero, P) → t``. It computes the same as `quark.numbers.NumberFormat.round_`.
            ``zero`` is None or a float32 tensor that can be broadcast.
        encode: The function ``(t, P) → codes``, or None if torch computes codes. It computes the same as
            `quark.numbers.NumberFormat.encode`. It returns int32 numbers; their lowest bits are stored.
        scales: The function ``(low, high, P) → scale``, or None if torch computes scales. It returns the
            float32 scales that `quark.numbers.NumberFormat.qparams` computes.
        zeros: The function ``(low, scale, P) → zero``, or None if specs have no zero points. It returns
            float32 zero points.
        parameters: The argument P of each function. It is any frozen object whose ``repr`` shows all values
            that it contains. The object and its attributes are constants of the compiled kernel.
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
    """Return whether kernels round the tensors on ``device`` whose format has device code.

    If ``QUARK_KERNELS=cpu`` and ``TRITON_INTERPRET=1`` are set, Triton's interpreter runs the kernels on the
    CPU. Tests use these settings. Code that ``torch.compile`` traces uses no kernels, because the compiler
    fuses torch operations. Torch operations also round if Triton is missing or older than `OLDEST_TRITON`.
    """
    if torch.compiler.is_compiling() or device.type not in _types(os.environ.get(VARIABLE, _DEFAULT)):
        return False
    return _has_triton()


@lru_cache(maxsize=16)
def _types(named: str) -> frozenset[str]:
    """Return the device types that ``named``, a value of the environment variable `VARIABLE`, contains."""
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
    get_logger(__name__).warning(f"{reason}, so slower PyTorch operations compute the same values. Install Triton {OLDEST_TRITON} or newer")
    return False


def launching_on(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which kernels are launched on ``device``.

    Without this context, Triton would use the current device, even if the arguments are on another device.
    """
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)


@attrs.frozen
class Runs:
    """A rule that maps the elements of a contiguous tensor to their scales.

    The tensor is cut into runs of adjacent elements. All elements of a run have the same scale. Run number r
    has scale number ``r // span · period + r % period``.

    Attributes:
        length: Number of elements in a run.
        period: Number of consecutive runs that have different scales.
        span: Number of consecutive runs that use the same ``period`` scales in turn. It is a multiple of
            ``period``.
    """

    length: int
    period: int = 1
    span: int = 1

    @property
    def have_own_scales(self) -> bool:
        """Whether each run has its own scale. The scales then have the same order as the runs."""
        return self.period == self.span
