"""Formats without scales: a plain cast to a 16-bit float."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from quark.config.tensor import QTensorConfig
from quark.numbers import NumberFormat, QParams

__all__ = ["BFLOAT16", "FLOAT16", "CastFormat"]


@attrs.frozen(kw_only=True)
class CastFormat(NumberFormat):
    """float16 or bfloat16: "codes" are the values in that dtype."""

    name: str
    bits: int
    storage_dtype: torch.dtype
    is_cast: bool = True
    default_observer: str = "PlaceholderObserver"

    def spec_error(self, spec: QTensorConfig) -> str | None:
        return None

    def max_magnitude(self, spec: QTensorConfig) -> float:
        return torch.finfo(self.storage_dtype).max

    def qparams(self, low: Tensor, high: Tensor, spec: QTensorConfig) -> QParams:
        return QParams(torch.ones((), dtype=torch.float32, device=low.device))

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return t.copy_(t.to(self.storage_dtype))

    def encode(self, t: Tensor) -> Tensor:
        return t.to(self.storage_dtype)

    def decode(self, codes: Tensor) -> Tensor:
        return codes.float()


FLOAT16 = CastFormat(name="float16", bits=16, storage_dtype=torch.float16)
BFLOAT16 = CastFormat(name="bfloat16", bits=16, storage_dtype=torch.bfloat16)
