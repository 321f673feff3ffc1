"""``*Spec`` helpers of formats with a scale per block: FP4, FP6, OCP Microscaling, block floating point."""

from __future__ import annotations

from typing import ClassVar

import attrs

from quark.config.enums import Dtype, QSchemeType, RoundType, ScaleType
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError
from quark_schemes.specs.floats import PerGroupFloatSpec
from quark_schemes.specs.options import SingleLevelSpec

__all__ = [
    "AmdFP4Spec",
    "BFP16Spec",
    "FP4PerGroupSpec",
    "FP6E2M3PerGroupSpec",
    "FP6E3M2PerGroupSpec",
    "MX6Spec",
    "MX9Spec",
    "OCP_MXFP4DiffsSpec",
    "OCP_MXFP4Spec",
    "OCP_MXFP6E2M3Spec",
    "OCP_MXFP6E3M2Spec",
    "OCP_MXFP8E4M3Spec",
    "OCP_MXFP8E5M2Spec",
    "OCP_MXINT8Spec",
    "OCP_MXSpec",
]


_AMD_GROUPS = (16, 32)


class FP4PerGroupSpec(PerGroupFloatSpec):
    """FP4 E2M1 with a scale for each group."""

    dtype = Dtype.fp4


class FP6E2M3PerGroupSpec(PerGroupFloatSpec):
    """FP6 E2M3 with a scale for each group."""

    dtype = Dtype.fp6_e2m3


class FP6E3M2PerGroupSpec(PerGroupFloatSpec):
    """FP6 E3M2 with a scale for each group."""

    dtype = Dtype.fp6_e3m2


@attrs.define
class AmdFP4Spec(SingleLevelSpec):
    """FP4 E2M1 with an unsigned E5M3 scale for each group of 16 or 32 elements."""

    dtype = Dtype.fp4
    fixed = {
        "qscheme": QSchemeType.per_group,
        "observer_cls": "PerBlockMXObserver",
        "scale_type": ScaleType.float8_e5m3,
        "scale_format": "e5m3",
        "round_method": RoundType.half_even,
    }
    ch_axis: int | None = None
    group_size: int | None = None
    is_dynamic: bool | None = True

    def to_quantization_spec(self) -> QTensorConfig:
        if self.group_size not in _AMD_GROUPS:
            raise ConfigError(f"AmdFP4Spec has groups of 16 or 32 elements, not of {self.group_size}")
        return super().to_quantization_spec()


@attrs.define
class OCP_MXSpec(SingleLevelSpec):  # noqa: N801 - AMD Quark's name
    """Base of the OCP Microscaling helpers. Each 32 elements share a scale that is a power of two."""

    OCP_block_size: ClassVar[int] = 32
    fixed = {
        "qscheme": QSchemeType.per_group,
        "group_size": OCP_block_size,
        "observer_cls": "PerBlockMXObserver",
        "scale_type": ScaleType.float,
        "scale_format": "e8m0",
        "round_method": RoundType.half_even,
    }
    ch_axis: int | None = None
    is_dynamic: bool | None = True
    scale_calculation_mode: str | None = "even"


class OCP_MXFP8E4M3Spec(OCP_MXSpec):  # noqa: N801
    """MXFP8 with E4M3 elements."""

    dtype = Dtype.fp8_e4m3


class OCP_MXFP8E5M2Spec(OCP_MXSpec):  # noqa: N801
    """MXFP8 with E5M2 elements."""

    dtype = Dtype.fp8_e5m2


class OCP_MXFP6E3M2Spec(OCP_MXSpec):  # noqa: N801
    """MXFP6 with E3M2 elements."""

    dtype = Dtype.fp6_e3m2


class OCP_MXFP6E2M3Spec(OCP_MXSpec):  # noqa: N801
    """MXFP6 with E2M3 elements."""

    dtype = Dtype.fp6_e2m3


class OCP_MXFP4Spec(OCP_MXSpec):  # noqa: N801
    """MXFP4 with FP4 (E2M1) elements."""

    dtype = Dtype.fp4


class OCP_MXINT8Spec(OCP_MXSpec):  # noqa: N801
    """MXINT8, as a spec with the format ``mx`` and the element format INT8."""

    dtype, fixed = Dtype.mx, OCP_MXSpec.fixed | {"mx_element_dtype": Dtype.int8}


@attrs.define
class OCP_MXFP4DiffsSpec(SingleLevelSpec):  # noqa: N801
    """MXFP4 under the name of AMD Quark's differentiable variant. The spec is static by default."""

    ch_axis: int | None = None
    is_dynamic: bool | None = False
    scale_calculation_mode: str | None = "even"

    def to_quantization_spec(self) -> QTensorConfig:
        return OCP_MXFP4Spec(self.ch_axis, self.is_dynamic, self.scale_calculation_mode).to_quantization_spec()


_BFP16_BLOCK = 8


def _config(dtype: Dtype, axis: int | None, block: int | None, mode: str | None) -> QTensorConfig:
    return QTensorConfig(dtype=dtype, ch_axis=axis, group_size=block, round_method=RoundType.half_even, scale_calculation_mode=mode)


@attrs.define
class _Microexponent(SingleLevelSpec):
    ch_axis: int | None = None
    block_size: int | None = None
    scale_calculation_mode: str | None = "even"

    def to_quantization_spec(self) -> QTensorConfig:
        return _config(self.dtype, self.ch_axis, self.block_size, self.scale_calculation_mode)


class MX6Spec(_Microexponent):
    """MX6, a format with shared microexponents and six bits per element."""

    dtype = Dtype.mx6


class MX9Spec(_Microexponent):
    """MX9, a format with shared microexponents and nine bits per element."""

    dtype = Dtype.mx9


@attrs.define
class BFP16Spec(SingleLevelSpec):
    """BFP16, a format in which eight mantissas of eight bits share an exponent of eight bits."""

    ch_axis: int | None = None
    scale_calculation_mode: str | None = "even"

    def to_quantization_spec(self) -> QTensorConfig:
        return _config(Dtype.bfp16, self.ch_axis, _BFP16_BLOCK, self.scale_calculation_mode)
