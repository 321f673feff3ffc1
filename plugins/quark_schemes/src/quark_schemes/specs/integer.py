"""``*Spec`` helpers of the integer formats.

A helper has the same fields, in the same order and with the same defaults, as the helper of AMD Quark.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from quark.config.enums import Dtype, QSchemeType
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError
from quark_schemes.specs.options import SingleLevelSpec

__all__ = [
    "Int2PerGroupSpec",
    "Int3PerChannelSpec",
    "Int3PerGroupSpec",
    "Int4PerChannelSpec",
    "Int4PerGroupSpec",
    "Int4PerTensorSpec",
    "Int8PerChannelSpec",
    "Int8PerGroupSpec",
    "Int8PerTensorSpec",
    "Uint4PerChannelSpec",
    "Uint4PerGroupSpec",
    "Uint4PerTensorSpec",
    "Uint8PerChannelSpec",
    "Uint8PerGroupSpec",
    "Uint8PerTensorSpec",
]

_SYMMETRIC = attrs.Factory(lambda self: self.symmetric_by_default, takes_self=True)


class _Integer(SingleLevelSpec):
    """Base of all helpers of integer formats.

    The subclasses define the fields, in the same order as in AMD Quark.
    """

    symmetric_by_default: ClassVar[bool]
    is_dynamic: bool | None

    def to_quantization_spec(self) -> QTensorConfig:
        if self.is_dynamic is None:
            raise ConfigError(f"{type(self).__name__} needs is_dynamic: set False for weights, True for dynamic activation scales")
        return super().to_quantization_spec()


@attrs.define
class _PerTensor(_Integer):
    fixed = {"qscheme": QSchemeType.per_tensor}
    observer_method: str | None = "min_max"
    symmetric: bool | None = _SYMMETRIC
    scale_type: Any = "float"
    round_method: Any = "half_even"
    is_dynamic: bool | None = False
    observer_options: Mapping[str, Any] | None = None


@attrs.define
class _PerChannel(_Integer):
    fixed = {"qscheme": QSchemeType.per_channel, "observer_cls": "PerChannelMinMaxObserver"}
    ch_axis: int | None = None
    symmetric: bool | None = _SYMMETRIC
    scale_type: Any = "float"
    round_method: Any = "half_even"
    is_dynamic: bool | None = False


@attrs.define
class _PerGroup(_Integer):
    fixed = {"qscheme": QSchemeType.per_group, "observer_cls": "PerGroupMinMaxObserver"}
    ch_axis: int | None = None
    group_size: int | None = None
    symmetric: bool | None = _SYMMETRIC
    scale_type: Any = "float"
    round_method: Any = "half_even"
    is_dynamic: bool | None = False


@attrs.define
class _FourBitPerGroup(_Integer):
    """Base of the 4-bit helpers with a scale for each group.

    In these helpers, ``is_dynamic`` comes before ``scale_type`` and ``round_method``, as in AMD Quark.
    """

    fixed = _PerGroup.fixed
    ch_axis: int | None = None
    group_size: int | None = None
    symmetric: bool | None = _SYMMETRIC
    is_dynamic: bool | None = False
    scale_type: Any = "float"
    round_method: Any = "half_even"


class Int4PerTensorSpec(_PerTensor):
    """INT4 with one scale per tensor."""

    dtype, symmetric_by_default = Dtype.int4, True


class Uint4PerTensorSpec(_PerTensor):
    """UINT4 with one scale and one zero point per tensor."""

    dtype, symmetric_by_default = Dtype.uint4, False


class Int8PerTensorSpec(_PerTensor):
    """INT8 with one scale per tensor."""

    dtype, symmetric_by_default = Dtype.int8, True


class Uint8PerTensorSpec(_PerTensor):
    """UINT8 with one scale and one zero point per tensor."""

    dtype, symmetric_by_default = Dtype.uint8, False


class Int3PerChannelSpec(_PerChannel):
    """INT3 with a scale and a zero point for each channel."""

    dtype, symmetric_by_default = Dtype.int3, False


class Int4PerChannelSpec(_PerChannel):
    """INT4 with a scale for each channel."""

    dtype, symmetric_by_default = Dtype.int4, True


class Int8PerChannelSpec(_PerChannel):
    """INT8 with a scale and a zero point for each channel."""

    dtype, symmetric_by_default = Dtype.int8, False


class Uint8PerChannelSpec(_PerChannel):
    """UINT8 with a scale for each channel."""

    dtype, symmetric_by_default = Dtype.uint8, True


@attrs.define
class Uint4PerChannelSpec(_Integer):
    """UINT4 with a scale and a zero point for each channel.

    ``is_dynamic`` has no default, as in AMD Quark.
    """

    dtype, symmetric_by_default = Dtype.uint4, False
    fixed = _PerChannel.fixed
    ch_axis: int | None = None
    symmetric: bool | None = _SYMMETRIC
    scale_type: Any = "float"
    round_method: Any = "half_even"
    is_dynamic: bool | None = None
    zero_point_type: Any = "int32"


class Int2PerGroupSpec(_PerGroup):
    """INT2 with a scale for each group."""

    dtype, symmetric_by_default = Dtype.int2, True


class Int3PerGroupSpec(_PerGroup):
    """INT3 with a scale for each group."""

    dtype, symmetric_by_default = Dtype.int3, True


class Int8PerGroupSpec(_PerGroup):
    """INT8 with a scale for each group."""

    dtype, symmetric_by_default = Dtype.int8, True


class Uint8PerGroupSpec(_PerGroup):
    """UINT8 with a scale and a zero point for each group."""

    dtype, symmetric_by_default = Dtype.uint8, False


class Int4PerGroupSpec(_FourBitPerGroup):
    """INT4 with a scale for each group."""

    dtype, symmetric_by_default = Dtype.int4, True


class Uint4PerGroupSpec(_FourBitPerGroup):
    """UINT4 with a scale and a zero point for each group."""

    dtype, symmetric_by_default = Dtype.uint4, False
