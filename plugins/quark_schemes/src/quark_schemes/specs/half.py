"""``*Spec`` helpers of the 16-bit floats, which only cast."""

from __future__ import annotations

import attrs

from quark.config.enums import Dtype
from quark.config.tensor import QTensorConfig
from quark_schemes.specs.options import SingleLevelSpec

__all__ = ["Bfloat16Spec", "Float16Spec"]


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
