"""``*Spec`` helpers of block floating point: one exponent for a block."""

from __future__ import annotations

from typing import ClassVar

import attrs

from quark.config.enums import Dtype, RoundType
from quark.config.tensor import QTensorConfig
from quark_schemes.specs.options import SingleLevelSpec

__all__ = ["BFP16Spec", "MX6Spec", "MX9Spec"]

_BFP16_BLOCK = 8


def _config(dtype: Dtype, axis: int | None, block: int | None) -> QTensorConfig:
    return QTensorConfig(dtype=dtype, ch_axis=axis, group_size=block, round_method=RoundType.half_even, scale_calculation_mode="even")


@attrs.define
class _Microexponent(SingleLevelSpec):
    dtype: ClassVar[Dtype]
    ch_axis: int | None = None
    block_size: int | None = None
    scale_calculation_mode: str | None = "even"

    def to_quantization_spec(self) -> QTensorConfig:
        return _config(self.dtype, self.ch_axis, self.block_size)


@attrs.define
class MX6Spec(_Microexponent):
    """MX6: shared microexponents, six bits an element."""

    dtype = Dtype.mx6


@attrs.define
class MX9Spec(_Microexponent):
    """MX9: shared microexponents, nine bits an element."""

    dtype = Dtype.mx9


@attrs.define
class BFP16Spec(SingleLevelSpec):
    """BFP16: eight mantissas of eight bits that share an exponent of eight."""

    ch_axis: int | None = None
    mode: str | None = "even"

    def to_quantization_spec(self) -> QTensorConfig:
        return _config(Dtype.bfp16, self.ch_axis, _BFP16_BLOCK)
