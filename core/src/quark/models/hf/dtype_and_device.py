"""Dtypes and devices by the names that users write."""

from __future__ import annotations

from pathlib import Path

import torch

from quark.errors import ConfigError
from quark.models.hf.shards import check_shards

__all__ = ["first_dtype", "torch_device", "torch_dtype"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def torch_dtype(name: str) -> torch.dtype | None:
    """Return the torch dtype of that name; None for ``auto``. Raises ConfigError for others."""
    if name != "auto" and name not in _DTYPES:
        raise ConfigError(f"the dtype {name!r} cannot be used: use auto, {', '.join(_DTYPES)}")
    return _DTYPES.get(name)


def torch_device(name: str) -> torch.device:
    """Return the device of that name. Raises ConfigError where it cannot be used."""
    try:
        target = torch.device(name)
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"the device {name!r} cannot be used here: {error}") from error
    return target


def first_dtype(path: Path) -> torch.dtype:
    """Return the dtype of the first floating-point tensor of a checkpoint; float32 where it has none."""
    stored = (_STORED.get(dtype) for shard in check_shards(path) for dtype, _ in shard.tensors.values())
    return next((dtype for dtype in stored if dtype is not None), torch.float32)
