"""``*Spec`` helpers of two levels."""

from __future__ import annotations

import attrs

from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError
from quark_schemes.specs.options import DataTypeSpec, SingleLevelSpec

__all__ = ["ProgressiveSpec", "ScaleQuantSpec"]


def _level(value: SingleLevelSpec | QTensorConfig) -> QTensorConfig:
    spec = value.to_quantization_spec() if isinstance(value, SingleLevelSpec) else value
    if not isinstance(spec, QTensorConfig):
        raise ConfigError(f"a level is a *Spec helper or a QTensorConfig, not {value!r}")
    return spec


@attrs.define
class ProgressiveSpec(DataTypeSpec):
    """Quantize by ``first_stage``, then quantize the codes of that by ``second_stage``."""

    first_stage: SingleLevelSpec | QTensorConfig
    second_stage: SingleLevelSpec | QTensorConfig

    def to_quantization_spec(self) -> list[QTensorConfig]:
        return [_level(self.first_stage), _level(self.second_stage)]


@attrs.define
class ScaleQuantSpec(DataTypeSpec):
    """Quantize by ``first_stage``, and its scales by ``second_stage``."""

    first_stage: SingleLevelSpec | QTensorConfig
    second_stage: SingleLevelSpec | QTensorConfig

    def to_quantization_spec(self) -> list[QTensorConfig]:
        return [_level(self.first_stage), attrs.evolve(_level(self.second_stage), is_scale_quant=True)]
