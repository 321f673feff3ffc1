"""``*Spec`` helpers of two levels."""

from __future__ import annotations

import attrs

from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError
from quark_schemes.specs.options import DataTypeSpec, SingleLevelSpec


def _stage(value: SingleLevelSpec | QTensorConfig) -> QTensorConfig:
    found = value.to_quantization_spec() if isinstance(value, SingleLevelSpec) else value
    if not isinstance(found, QTensorConfig):
        raise ConfigError(f"a stage is a *Spec helper or a QTensorConfig, not {value!r}")
    return found


@attrs.define
class ProgressiveSpec(DataTypeSpec):
    """Quantize, then quantize what came out: ``first_stage``, then ``second_stage``."""

    first_stage: SingleLevelSpec | QTensorConfig
    second_stage: SingleLevelSpec | QTensorConfig

    def to_quantization_spec(self) -> list[QTensorConfig]:
        return [_stage(self.first_stage), _stage(self.second_stage)]


@attrs.define
class ScaleQuantSpec(DataTypeSpec):
    """Quantize by ``first_stage``, and its scales by ``second_stage``."""

    first_stage: SingleLevelSpec | QTensorConfig
    second_stage: SingleLevelSpec | QTensorConfig

    def to_quantization_spec(self) -> list[QTensorConfig]:
        return [_stage(self.first_stage), attrs.evolve(_stage(self.second_stage), is_scale_quant=True)]
