"""Which devices use kernels: those of the types in ``QUARK_KERNELS``, where Triton can be imported."""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch

__all__ = ["VARIABLE", "launching_on", "uses_kernels"]

VARIABLE = "QUARK_KERNELS"
"""Environment variable with the device types that use kernels, separated by commas; ``cuda`` (which is AMD's GPUs too) where it is not set,
none where it is empty."""
_DEFAULT = "cuda"


def uses_kernels(device: torch.device) -> bool:
    """Return whether tensors on that device are rounded by kernels, where their number format brings device code.

    With ``QUARK_KERNELS=cpu`` and ``TRITON_INTERPRET=1`` the kernels run on the CPU, in Triton's interpreter,
    as tests do.
    """
    return device.type in _types(os.environ.get(VARIABLE, _DEFAULT))


@lru_cache(maxsize=16)
def _types(named: str) -> frozenset[str]:
    """Return the device types of a value of the variable; none where there is no Triton."""
    types = frozenset(name.strip() for name in named.split(",") if name.strip())
    return types if types and importlib.util.find_spec("triton") is not None else frozenset()


def launching_on(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which kernels are launched on that device: Triton takes the current one, wherever its arguments lie."""
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)
