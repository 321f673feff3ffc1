"""``*Spec`` helpers of the FP8 formats, and of the 16-bit floats, which only cast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from quark.config.enums import Dtype, QSchemeType, RoundType
from quark.config.tensor import QTensorConfig
from quark_schemes.specs.options import PER_TENSOR_OBSERVERS, ROUND_METHODS, SCALE_TYPES, SingleLevelSpec, choice

__all__ = [
    "Bfloat16Spec",
    "FP8E4M3PerChannelSpec",
    "FP8E4M3PerGroupSpec",
    "FP8E4M3PerTensorSpec",
    "FP8E5M2PerChannelSpec",
    "FP8E5M2PerGroupSpec",
    "FP8E5M2PerTensorSpec",
    "FP8E5M3PerTensorSpec",
    "Float16Spec",
    "PerGroupFloatSpec",
]


@attrs.define
class _E4M3Like(SingleLevelSpec):
    """Base of the FP8 helpers with one scale: symmetric, rounded half to even, without options."""

    dtype: ClassVar[Dtype]
    observer_method: str | None = "min_max"
    scale_type: Any = None
    is_dynamic: bool | None = False
    observer_options: Mapping[str, Any] | None = None

    def to_quantization_spec(self) -> QTensorConfig:
        return QTensorConfig(
            dtype=self.dtype,
            observer_cls=choice("observer_method", self.observer_method, PER_TENSOR_OBSERVERS) or PER_TENSOR_OBSERVERS["min_max"],
            symmetric=True,
            scale_type=choice("scale_type", self.scale_type, SCALE_TYPES),
            round_method=RoundType.half_even,
            qscheme=QSchemeType.per_tensor,
            is_dynamic=self.is_dynamic,
            observer_options=self.observer_options,
        )


@attrs.define
class FP8E4M3PerTensorSpec(_E4M3Like):
    """FP8 E4M3, one scale."""

    dtype = Dtype.fp8_e4m3


@attrs.define
class FP8E5M3PerTensorSpec(_E4M3Like):
    """Unsigned FP8 E5M3, one scale: for scales of scales."""

    dtype = Dtype.fp8_e5m3


@attrs.define
class FP8E5M2PerTensorSpec(SingleLevelSpec):
    """FP8 E5M2, one scale."""

    observer_method: str | None = "min_max"
    symmetric: bool | None = True
    scale_type: Any = "float"
    round_method: Any = "half_even"
    is_dynamic: bool | None = False
    observer_options: Mapping[str, Any] | None = None

    def to_quantization_spec(self) -> QTensorConfig:
        return QTensorConfig(
            dtype=Dtype.fp8_e5m2,
            observer_cls=choice("observer_method", self.observer_method, PER_TENSOR_OBSERVERS) or PER_TENSOR_OBSERVERS["min_max"],
            symmetric=self.symmetric,
            scale_type=choice("scale_type", self.scale_type, SCALE_TYPES),
            round_method=choice("round_method", self.round_method, ROUND_METHODS),
            qscheme=QSchemeType.per_tensor,
            is_dynamic=self.is_dynamic,
            observer_options=self.observer_options,
        )


@attrs.define
class _PerChannel(SingleLevelSpec):
    dtype: ClassVar[Dtype]
    ch_axis: int | None = None
    symmetric: bool | None = True
    scale_type: Any = "float"
    round_method: Any = "half_even"
    is_dynamic: bool | None = False

    def to_quantization_spec(self) -> QTensorConfig:
        return QTensorConfig(
            dtype=self.dtype,
            observer_cls="PerChannelMinMaxObserver",
            symmetric=self.symmetric,
            scale_type=choice("scale_type", self.scale_type, SCALE_TYPES),
            round_method=choice("round_method", self.round_method, ROUND_METHODS),
            qscheme=QSchemeType.per_channel,
            ch_axis=self.ch_axis,
            is_dynamic=self.is_dynamic,
        )


@attrs.define
class FP8E4M3PerChannelSpec(_PerChannel):
    """FP8 E4M3, a scale for each channel; dynamic activations of axis 1: for each token."""

    dtype = Dtype.fp8_e4m3


@attrs.define
class FP8E5M2PerChannelSpec(_PerChannel):
    """FP8 E5M2, a scale for each channel."""

    dtype = Dtype.fp8_e5m2


@attrs.define
class PerGroupFloatSpec(SingleLevelSpec):
    """Small floats with a scale for each group; base of the FP8, FP6 and FP4 helpers."""

    dtype: ClassVar[Dtype]
    ch_axis: int | None = None
    group_size: int | None = None
    scale_format: str | None = "float32"
    scale_calculation_mode: str | None = None
    is_dynamic: bool | None = True
    scale_type: Any = "float"

    def to_quantization_spec(self) -> QTensorConfig:
        return QTensorConfig(
            dtype=self.dtype,
            observer_cls="PerBlockMXObserver",
            scale_type=choice("scale_type", self.scale_type, SCALE_TYPES),
            scale_format=self.scale_format,
            scale_calculation_mode=self.scale_calculation_mode,
            round_method=RoundType.half_even,
            qscheme=QSchemeType.per_group,
            ch_axis=self.ch_axis,
            group_size=self.group_size,
            is_dynamic=self.is_dynamic,
        )


@attrs.define
class FP8E4M3PerGroupSpec(PerGroupFloatSpec):
    """FP8 E4M3, a scale for each group."""

    dtype = Dtype.fp8_e4m3


@attrs.define
class FP8E5M2PerGroupSpec(PerGroupFloatSpec):
    """FP8 E5M2, a scale for each group."""

    dtype = Dtype.fp8_e5m2


@attrs.define
class Float16Spec(SingleLevelSpec):
    """float16."""

    def to_quantization_spec(self) -> QTensorConfig:
        return QTensorConfig(dtype=Dtype.float16, observer_cls="PlaceholderObserver")


@attrs.define
class Bfloat16Spec(SingleLevelSpec):
    """bfloat16."""

    def to_quantization_spec(self) -> QTensorConfig:
        return QTensorConfig(dtype=Dtype.bfloat16, observer_cls="PlaceholderObserver")
