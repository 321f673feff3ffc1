"""Quantizers of one observer, observers with data, and data with outliers.

For all tests of observers.
"""

from typing import Any

import torch
from torch import Tensor

from quark.config.tensor import QTensorConfig
from quark.numbers import Observer, TensorQuantizer, quantizer_for

SHAPE = {"per_channel": {"ch_axis": 0}, "per_group": {"ch_axis": -1, "group_size": 8}}


def spec_of(observer: str, dtype: str = "int8", symmetric: bool = True, **more: Any) -> QTensorConfig:
    qscheme = "per_tensor" if "Tensor" in observer else "per_channel" if "Channel" in observer else "per_group"
    shape = SHAPE.get(qscheme, {})
    return QTensorConfig(dtype=dtype, observer_cls=observer, is_dynamic=False, qscheme=qscheme, symmetric=symmetric, **shape, **more)


def quantizer_of(observer: str, *args: Any, **more: Any) -> TensorQuantizer:
    return quantizer_for(spec_of(observer, *args, **more), activation=False)


def seen(observer: str, *tensors: Tensor, **more: Any) -> Observer:
    found = quantizer_of(observer, **more).observer()
    for x in tensors:
        found.observe(x)
    return found


def heavy_tailed(rows: int = 16, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 64, generator=g) + 0.3
    x[:, 5] *= 12
    return x
