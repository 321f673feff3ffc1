"""Base classes of the ``*Spec`` helpers with one or two levels, and the strings that their options accept.

The strings are the same as in AMD Quark's public API. Options also accept members of enumerations.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar

import attrs

from quark.config.enums import Dtype, RoundType, ScaleType, ZeroPointType
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError

__all__ = ["PER_TENSOR_OBSERVERS", "DataTypeSpec", "ProgressiveSpec", "ScaleQuantSpec", "SingleLevelSpec"]


PER_TENSOR_OBSERVERS = {
    "min_max": "PerTensorMinMaxObserver",
    "histogram": "PerTensorHistogramObserver",
    "histogrampro": "PerTensorHistogramObserverPro",
    "MSE": "PerTensorMSEObserver",
    "percentile": "PerTensorPercentileObserver",
}
_SCALE_TYPES = {
    "float": ScaleType.float,
    "float32": ScaleType.float32,
    "float16": ScaleType.float16,
    "bfloat16": ScaleType.bfloat16,
    "power_of_2": ScaleType.pof2,
    "float8_e5m3": ScaleType.float8_e5m3,
}
_ROUND_METHODS = {"round": RoundType.round, "floor": RoundType.floor, "half_even": RoundType.half_even}
_ZERO_POINT_TYPES = {"int32": ZeroPointType.int32, "float32": ZeroPointType.float32}
_CHOICES: dict[str, Mapping[str, Any]] = {
    "observer_method": PER_TENSOR_OBSERVERS,
    "scale_type": _SCALE_TYPES,
    "round_method": _ROUND_METHODS,
    "zero_point_type": _ZERO_POINT_TYPES,
}
"""Field of a helper → dictionary from option string to value."""


def _choice(option: str, value: Any, choices: Mapping[str, Any]) -> Any:
    """Return the enumeration member for an option string. If ``value`` is None or already a member, return it
    unchanged.

    Raises:
        ConfigError: (a ValueError) ``value`` is not None, not a member, and not a known string.
    """
    if value is None or (isinstance(value, Enum) and value in choices.values()):
        return value
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"Invalid {option} {value!r}: use one of {', '.join(choices)}")
    return choices[value]


@attrs.define
class DataTypeSpec:
    """Base of all ``*Spec`` helpers."""

    def to_quantization_spec(self) -> QTensorConfig | list[QTensorConfig]:
        """Return the quantization of a tensor, as one configuration or as a list with one for each level."""
        raise TypeError(f"{type(self).__name__} cannot build a configuration: use one of its subclasses")


class SingleLevelSpec(DataTypeSpec):
    """Base of the helpers that describe one level of quantization.

    A field sets the field of the same name in `QTensorConfig`, except that ``observer_method`` sets
    ``observer_cls``.

    Attributes:
        dtype: The number format.
        fixed: Settings that are the same for all objects of a class.
    """

    dtype: ClassVar[Dtype]
    fixed: ClassVar[Mapping[str, Any]] = {}

    def to_quantization_spec(self) -> QTensorConfig:
        """Return the quantization of a tensor, as one configuration."""
        if not hasattr(self, "dtype"):
            raise TypeError(f"{type(self).__name__} cannot build a configuration: use one of its subclasses")
        settings = attrs.asdict(self, recurse=False)
        for name, choices in _CHOICES.items():
            if name in settings:
                settings[name] = _choice(name, settings[name], choices)
        if "observer_method" in settings:
            settings["observer_cls"] = settings.pop("observer_method") or PER_TENSOR_OBSERVERS["min_max"]
        return QTensorConfig(dtype=self.dtype, **self.fixed, **settings)


def _level(value: SingleLevelSpec | QTensorConfig) -> QTensorConfig:
    spec = value.to_quantization_spec() if isinstance(value, SingleLevelSpec) else value
    if not isinstance(spec, QTensorConfig):
        raise ConfigError(f"a level must be a *Spec helper or a QTensorConfig, not {value!r}")
    return spec


@attrs.define
class ProgressiveSpec(DataTypeSpec):
    """Quantization in two stages: ``first_stage`` rounds a tensor, and ``second_stage`` rounds the codes."""

    first_stage: SingleLevelSpec | QTensorConfig
    second_stage: SingleLevelSpec | QTensorConfig

    def to_quantization_spec(self) -> list[QTensorConfig]:
        return [_level(self.first_stage), _level(self.second_stage)]


@attrs.define
class ScaleQuantSpec(DataTypeSpec):
    """Quantization with rounded scales: ``first_stage`` rounds a tensor, and ``second_stage`` the scales."""

    first_stage: SingleLevelSpec | QTensorConfig
    second_stage: SingleLevelSpec | QTensorConfig

    def to_quantization_spec(self) -> list[QTensorConfig]:
        return [_level(self.first_stage), attrs.evolve(_level(self.second_stage), is_scale_quant=True)]
