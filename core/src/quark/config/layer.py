"""QLayerConfig: which tensors of a layer are quantized, and how; Slot: each of these tensors.

AMD Quark has two names for `QLayerConfig`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from typing import Any

import attrs

from quark.config.enums import DeviceType, QSchemeType
from quark.config.fields import checked, value_of, with_dataclass_view
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError

__all__ = ["ACTIVATIONS", "PARAMETERS", "QLayerConfig", "Slot", "TensorSpec", "levels"]


class Slot(StrEnum):
    """A tensor of a layer. As a string, it is the field name in `quark.config.layer.QLayerConfig`.

    >>> slot = Slot.input_tensors
    >>> slot.quantizer_attribute, slot.checkpoint_prefix, slot.is_activation
    ('input_quantizer', 'input', True)
    """

    input_tensors = "input_tensors"
    output_tensors = "output_tensors"
    weight = "weight"
    bias = "bias"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copy and send a value by its text: Python up to 3.11.3 sends `getattr`, which no rank accepts."""
        return type(self), (self.value,)

    @cached_property
    def label(self) -> str:
        """Its word in messages: ``"input"``."""
        return self.value.removesuffix("_tensors")

    @property
    def checkpoint_prefix(self) -> str:
        """First word of the names of its tensors in a checkpoint: ``"input"`` of ``input_scale``.

        Source: AMD Quark 0.13.
        """
        return self.label

    @cached_property
    def quantizer_attribute(self) -> str:
        """Attribute of a `QuantizedLayer` that holds its quantizer: ``"input_quantizer"``."""
        return f"{self.label}_quantizer"

    @cached_property
    def is_activation(self) -> bool:
        """Whether it is an activation, quantized in each forward, and not a parameter."""
        return self in (Slot.input_tensors, Slot.output_tensors)


PARAMETERS = (Slot.weight, Slot.bias)
"""The slots whose tensors are parameters, in the order of checkpoints."""

ACTIVATIONS = (Slot.input_tensors, Slot.output_tensors)
"""The slots whose tensors are activations."""

TensorSpec = QTensorConfig | Sequence[QTensorConfig]
"""One level, or a list of levels, each of which quantizes the result of the level before it."""


def _as_spec(value: Any) -> TensorSpec | None:
    if value is None or isinstance(value, QTensorConfig):
        return value
    if hasattr(value, "to_quantization_spec"):
        return _as_spec(value.to_quantization_spec())
    if isinstance(value, Sequence) and not isinstance(value, str) and value and all(isinstance(v, QTensorConfig) for v in value):
        return list(value)
    raise ConfigError(f"a tensor's quantization is a QTensorConfig, a list of them, or None, not {value!r}")


def levels(spec: TensorSpec | None) -> tuple[QTensorConfig, ...]:
    """Return the levels of a tensor's quantization: none, one, or several."""
    return () if spec is None else (spec,) if isinstance(spec, QTensorConfig) else tuple(spec)


def _mapped(spec: TensorSpec | None, convert: Callable[[QTensorConfig], Any]) -> Any:
    """Return one converted level, or the list of all; None if there is none."""
    if spec is None or isinstance(spec, QTensorConfig):
        return None if spec is None else convert(spec)
    return [convert(level) for level in spec]


def _from_json(value: Any) -> TensorSpec | None:
    if isinstance(value, list):
        return [QTensorConfig.from_dict(v) for v in value]
    return None if value is None else QTensorConfig.from_dict(value)


def _no_static_groups(_: Any, attribute: Any, value: TensorSpec | None) -> None:
    for level in levels(value):
        if level.qscheme is QSchemeType.per_group and level.is_dynamic is False:
            raise ConfigError(
                f"{attribute.name} cannot be static with a scale per group ({level.dtype.name}): use is_dynamic=True, or a scale per tensor"
            )


@with_dataclass_view
@attrs.define
class QLayerConfig:
    """The quantization of one layer: a tensor spec, or a list of levels, for each of its tensors.

    Old name: ``QuantizationConfig``.

    You can assign to its slots; they are checked then. A run works on a copy (`copied`).

    Attributes:
        input_tensors: Spec of the input activations; None leaves them unquantized.
        output_tensors: Spec of the output activations (keys and values of the cache).
        weight: Spec of the weight.
        bias: Spec of the bias.
        target_device: Part of AMD Quark's signature; without effect.

    Raises:
        ConfigError: (a ValueError) A slot holds no tensor spec; or activations are static with a scale per
            group, which is not possible.
    """

    input_tensors: TensorSpec | None = attrs.field(default=None, converter=_as_spec, validator=_no_static_groups)
    output_tensors: TensorSpec | None = attrs.field(default=None, converter=_as_spec, validator=_no_static_groups)
    weight: TensorSpec | None = attrs.field(default=None, converter=_as_spec)
    bias: TensorSpec | None = attrs.field(default=None, converter=_as_spec)
    target_device: DeviceType | None = None

    def copied(self) -> QLayerConfig:
        """Return an independent copy. Raises ConfigError if assigned fields do not agree."""
        slots: dict[str, Any] = {slot.value: _mapped(getattr(self, slot), QTensorConfig.copied) for slot in Slot}
        return attrs.evolve(self, **slots)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form. Every slot is a key, with null if it is not quantized."""
        device = None if self.target_device is None else self.target_device.name
        return {slot.value: _mapped(getattr(self, slot), QTensorConfig.to_dict) for slot in Slot} | {"target_device": device}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> QLayerConfig:
        """Read the JSON form; missing slots are None.

        Raises ConfigError for an unknown key, or a value of the wrong type.
        """
        unknown = sorted(set(checked(data, Mapping, "a layer's quantization")) - {*Slot, "target_device"})
        if unknown:
            raise ConfigError(f"a layer's quantization in JSON has unknown keys {unknown}; its keys are {', '.join(Slot)}, target_device")
        device = value_of(data, "target_device", str)
        return cls(
            **{s.value: _from_json(data.get(s)) for s in Slot}, target_device=None if device is None else DeviceType.from_str(device)
        )
