"""``*Spec`` helpers of the integer formats."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs

from quark.errors import ConfigError
from quark.specs.enums import Dtype, QSchemeType
from quark.specs.tensor import QTensorConfig
from quark_schemes.specs.options import PER_TENSOR_OBSERVERS, ROUND_METHODS, SCALE_TYPES, ZERO_POINT_TYPES, OneStageSpec, choice


class _Integer(OneStageSpec):
    """What all helpers of integer formats share."""

    dtype: ClassVar[Dtype]

    def _config(self, qscheme: QSchemeType, observer: str, **more: Any) -> QTensorConfig:
        if self.is_dynamic is None:  # type: ignore[attr-defined]
            raise ConfigError(f"{type(self).__name__} needs is_dynamic: False for weights, True for activations with ranges of their own")
        return QTensorConfig(
            dtype=self.dtype,
            observer_cls=observer,
            symmetric=self.symmetric,  # type: ignore[attr-defined]
            scale_type=choice("scale_type", self.scale_type, SCALE_TYPES),  # type: ignore[attr-defined]
            round_method=choice("round_method", self.round_method, ROUND_METHODS),  # type: ignore[attr-defined]
            qscheme=qscheme,
            is_dynamic=self.is_dynamic,  # type: ignore[attr-defined]
            **more,
        )


class _PerTensor(_Integer):
    def to_quantization_spec(self) -> QTensorConfig:
        observer = choice("observer_method", self.observer_method, PER_TENSOR_OBSERVERS)  # type: ignore[attr-defined]
        return self._config(QSchemeType.per_tensor, observer or PER_TENSOR_OBSERVERS["min_max"])


class _PerChannel(_Integer):
    def to_quantization_spec(self) -> QTensorConfig:
        zero = choice("zero_point_type", getattr(self, "zero_point_type", "int32"), ZERO_POINT_TYPES)
        return self._config(QSchemeType.per_channel, "PerChannelMinMaxObserver", ch_axis=self.ch_axis, zero_point_type=zero)  # type: ignore[attr-defined]


class _PerGroup(_Integer):
    def to_quantization_spec(self) -> QTensorConfig:
        return self._config(QSchemeType.per_group, "PerGroupMinMaxObserver", ch_axis=self.ch_axis, group_size=self.group_size)  # type: ignore[attr-defined]


@attrs.define
class Int4PerTensorSpec(_PerTensor):
    """INT4, one scale."""

    dtype = Dtype.int4
    observer_method: str | None = "min_max"
    symmetric: bool | None = True
    scale_type: Any = "float"
    round_method: Any = "half_even"
    is_dynamic: bool | None = False


@attrs.define
class Uint4PerTensorSpec(_PerTensor):
    """UINT4, one scale and zero point."""

    dtype = Dtype.uint4
    observer_method: str | None = "min_max"
    symmetric: bool | None = False
    scale_type: Any = "float"
    round_method: Any = "half_even"
    is_dynamic: bool | None = False


@attrs.define
class Int8PerTensorSpec(_PerTensor):
    """INT8, one scale."""

    dtype = Dtype.int8
    observer_method: str | None = "min_max"
    symmetric: bool | None = True
    scale_type: Any = "float"
    round_method: Any = "half_even"
    is_dynamic: bool | None = False


@attrs.define
class Uint8PerTensorSpec(_PerTensor):
    """UINT8, one scale and zero point."""

    dtype = Dtype.uint8
    observer_method: str | None = "min_max"
    symmetric: bool | None = False
    scale_type: Any = "float"
    round_method: Any = "half_even"
    is_dynamic: bool | None = False


@attrs.define
class Int3PerChannelSpec(_PerChannel):
    """INT3, a scale and a zero point for each channel."""

    dtype = Dtype.int3
    ch_axis: int | None = None
    symmetric: bool | None = False
    scale_type: Any = "float"
    round_method: Any = "half_even"
    is_dynamic: bool | None = False


@attrs.define
class Int4PerChannelSpec(_PerChannel):
    """INT4, a scale for each channel."""

    dtype = Dtype.int4
    ch_axis: int | None = None
    symmetric: bool | None = True
    scale_type: Any = "float"
    round_method: Any = "half_even"
    is_dynamic: bool | None = False


@attrs.define
class Uint4PerChannelSpec(_PerChannel):
    """UINT4, a scale and a zero point for each channel. ``is_dynamic`` has no default, as documented."""

    dtype = Dtype.uint4
    ch_axis: int | None = None
    symmetric: bool | None = False
    scale_type: Any = "float"
    round_method: Any = "half_even"
    is_dynamic: bool | None = None
    zero_point_type: Any = "int32"


@attrs.define
class Int8PerChannelSpec(_PerChannel):
    """INT8, a scale and a zero point for each channel."""

    dtype = Dtype.int8
    ch_axis: int | None = None
    symmetric: bool | None = False
    scale_type: Any = "float"
    round_method: Any = "half_even"
    is_dynamic: bool | None = False


@attrs.define
class Uint8PerChannelSpec(_PerChannel):
    """UINT8, a scale for each channel."""

    dtype = Dtype.uint8
    ch_axis: int | None = None
    symmetric: bool | None = True
    scale_type: Any = "float"
    round_method: Any = "half_even"
    is_dynamic: bool | None = False


@attrs.define
class Int2PerGroupSpec(_PerGroup):
    """INT2, a scale for each group."""

    dtype = Dtype.int2
    ch_axis: int | None = None
    group_size: int | None = None
    symmetric: bool | None = True
    scale_type: Any = "float"
    round_method: Any = "half_even"
    is_dynamic: bool | None = False


@attrs.define
class Int3PerGroupSpec(_PerGroup):
    """INT3, a scale for each group."""

    dtype = Dtype.int3
    ch_axis: int | None = None
    group_size: int | None = None
    symmetric: bool | None = True
    scale_type: Any = "float"
    round_method: Any = "half_even"
    is_dynamic: bool | None = False


@attrs.define
class Int4PerGroupSpec(_PerGroup):
    """INT4, a scale for each group."""

    dtype = Dtype.int4
    ch_axis: int | None = None
    group_size: int | None = None
    symmetric: bool | None = True
    is_dynamic: bool | None = False
    scale_type: Any = "float"
    round_method: Any = "half_even"


@attrs.define
class Uint4PerGroupSpec(_PerGroup):
    """UINT4, a scale and a zero point for each group."""

    dtype = Dtype.uint4
    ch_axis: int | None = None
    group_size: int | None = None
    symmetric: bool | None = False
    is_dynamic: bool | None = False
    scale_type: Any = "float"
    round_method: Any = "half_even"


@attrs.define
class Int8PerGroupSpec(_PerGroup):
    """INT8, a scale for each group."""

    dtype = Dtype.int8
    ch_axis: int | None = None
    group_size: int | None = None
    symmetric: bool | None = True
    scale_type: Any = "float"
    round_method: Any = "half_even"
    is_dynamic: bool | None = False


@attrs.define
class Uint8PerGroupSpec(_PerGroup):
    """UINT8, a scale and a zero point for each group."""

    dtype = Dtype.uint8
    ch_axis: int | None = None
    group_size: int | None = None
    symmetric: bool | None = False
    scale_type: Any = "float"
    round_method: Any = "half_even"
    is_dynamic: bool | None = False
