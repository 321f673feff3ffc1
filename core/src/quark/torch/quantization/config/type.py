"""``quark.torch.quantization.config.type``: AMD Quark's enumerations."""

from __future__ import annotations

from quark.config.enums import (
    DeviceType,
    Dtype,
    QSchemeType,
    QuantFlow,
    QuantizationMode,
    RoundType,
    ScaleType,
    ZeroPointType,
)

__all__ = ["DeviceType", "Dtype", "QSchemeType", "QuantFlow", "QuantizationMode", "RoundType", "ScaleType", "ZeroPointType"]
