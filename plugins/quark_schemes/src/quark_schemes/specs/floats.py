"""``*Spec`` helpers of the FP8 formats, and of casts to 16-bit floats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from quark.config.enums import Dtype, QSchemeType, RoundType
from quark_schemes.specs.options import SingleLevelSpec

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
    """Base of FP8 helpers with one scale per tensor. Their specs are symmetric and round half to even."""

    fixed = {"qscheme": QSchemeType.per_tensor, "symmetric": True, "round_method": RoundType.half_even}
    observer_method: str | None = "min_max"
    scale_type: Any = None
    is_dynamic: bool | None = False
    observer_options: Mapping[str, Any] | None = None


class FP8E4M3PerTensorSpec(_E4M3Like):
    """FP8 E4M3 with one scale per tensor."""

    dtype = Dtype.fp8_e4m3


class FP8E5M3PerTensorSpec(_E4M3Like):
    """Unsigned FP8 E5M3 with one scale per tensor.

    This format is only for scales, as the second stage of a ``ScaleQuantSpec``.
    """

    dtype = Dtype.fp8_e5m3


@attrs.define
class FP8E5M2PerTensorSpec(SingleLevelSpec):
    """FP8 E5M2 with one scale per tensor."""

    dtype = Dtype.fp8_e5m2
    fixed = {"qscheme": QSchemeType.per_tensor}
    observer_method: str | None = "min_max"
    symmetric: bool | None = True
    scale_type: Any = "float"
    round_method: Any = "half_even"
    is_dynamic: bool | None = False
    observer_options: Mapping[str, Any] | None = None


@attrs.define
class _PerChannel(SingleLevelSpec):
    fixed = {"qscheme": QSchemeType.per_channel, "observer_cls": "PerChannelMinMaxObserver"}
    ch_axis: int | None = None
    symmetric: bool | None = True
    scale_type: Any = "float"
    round_method: Any = "half_even"
    is_dynamic: bool | None = False


class FP8E4M3PerChannelSpec(_PerChannel):
    """FP8 E4M3 with a scale for each channel.

    With ``ch_axis=1``, dynamic activations have a scale for each token.
    """

    dtype = Dtype.fp8_e4m3


class FP8E5M2PerChannelSpec(_PerChannel):
    """FP8 E5M2 with a scale for each channel."""

    dtype = Dtype.fp8_e5m2


@attrs.define
class PerGroupFloatSpec(SingleLevelSpec):
    """Small floats with a scale for each group. This is the base of the FP8, FP6 and FP4 helpers."""

    fixed = {"qscheme": QSchemeType.per_group, "observer_cls": "PerBlockMXObserver", "round_method": RoundType.half_even}
    ch_axis: int | None = None
    group_size: int | None = None
    scale_format: str | None = "float32"
    scale_calculation_mode: str | None = None
    is_dynamic: bool | None = True
    scale_type: Any = "float"


class FP8E4M3PerGroupSpec(PerGroupFloatSpec):
    """FP8 E4M3 with a scale for each group."""

    dtype = Dtype.fp8_e4m3


class FP8E5M2PerGroupSpec(PerGroupFloatSpec):
    """FP8 E5M2 with a scale for each group."""

    dtype = Dtype.fp8_e5m2


class Float16Spec(SingleLevelSpec):
    """A cast to float16."""

    dtype, fixed = Dtype.float16, {"observer_cls": "PlaceholderObserver"}


class Bfloat16Spec(SingleLevelSpec):
    """A cast to bfloat16."""

    dtype, fixed = Dtype.bfloat16, {"observer_cls": "PlaceholderObserver"}
