"""Packing of formats whose codes are stored as they are, and whose scales have the number format that the spec names."""

from __future__ import annotations

from torch import Tensor

from quark.config.tensor import QTensorConfig
from quark.quantizers import Granularity, Packing, QParams
from quark_schemes.scale_formats import scale_format_of

__all__ = ["FormattedScalePacking"]


class FormattedScalePacking(Packing):
    """Scales in the spec's scale format; no zero points."""

    def pack_qparams(self, qparams: QParams, spec: QTensorConfig, granularity: Granularity, order: str) -> dict[str, Tensor]:
        return {"scale": scale_format_of(spec).encode(qparams.scale)}

    def unpack_qparams(
        self, tensors: dict[str, Tensor], spec: QTensorConfig, granularity: Granularity, order: str, shape: tuple[int, ...]
    ) -> QParams:
        return QParams(scale_format_of(spec).decode(tensors["scale"]))
