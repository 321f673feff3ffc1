"""`QLayerConfig` says how each tensor of a layer is quantized. `Slot` enumerates these tensors.

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
    """A tensor of a layer. A member's value is the name of a field in `quark.config.layer.QLayerConfig`.

    >>> slot = Slot.input_tensors
    >>> slot.quantizer_attribute, slot.checkpoint_prefix, slot.is_activation
    ('input_quantizer', 'input', True)
    """

    input_tensors = "input_tensors"
    output_tensors = "output_tensors"
    weight = "weight"
    bias = "bias"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Serialize a member as a pair of its class and its text.

        Python up to 3.11.3 would serialize a reference to `getattr`, which other processes refuse to load.
        """
        return type(self), (self.value,)

    @cached_property
    def label(self) -> str:
        """The word for this tensor in messages, such as ``"input"``."""
        return self.value.removesuffix("_tensors")

    @property
    def checkpoint_prefix(self) -> str:
        """First word of the names of stored tensors for this slot, such as ``"input"`` in ``input_scale``.

        AMD Quark 0.13 uses the same names.
        """
        return self.label

    @cached_property
    def quantizer_attribute(self) -> str:
        """Name of the quantizer's attribute in a `QuantizedLayer`, such as ``"input_quantizer"``."""
        return f"{self.label}_quantizer"

    @cached_property
    def is_activation(self) -> bool:
        """Whether this tensor is an activation. Activations are quantized in each forward pass.

        If False, the tensor is a parameter.
        """
        return self in (Slot.input_tensors, Slot.output_tensors)


PARAMETERS = (Slot.weight, Slot.bias)
"""The slots whose tensors are parameters, in the order in which a checkpoint stores them."""

ACTIVATIONS = (Slot.input_tensors, Slot.output_tensors)
"""The slots whose tensors are activations."""

TensorSpec = QTensorConfig | Sequence[QTensorConfig]
"""The quantization of a tensor: one level, or a list of levels that are applied one after the other."""


def _as_spec(value: Any) -> TensorSpec | None:
    if value is None or isinstance(value, QTensorConfig):
        return value
    if hasattr(value, "to_quantization_spec"):
        return _as_spec(value.to_quantization_spec())
    if isinstance(value, Sequence) and not isinstance(value, str) and value and all(isinstance(v, QTensorConfig) for v in value):
        return list(value)
    raise ConfigError(f"a tensor's quantization must be a QTensorConfig, a list of them, or None, not {value!r}")


def levels(spec: TensorSpec | None) -> tuple[QTensorConfig, ...]:
    """Return the levels of a tensor's quantization as a tuple. The tuple is empty if ``spec`` is None."""
    return () if spec is None else (spec,) if isinstance(spec, QTensorConfig) else tuple(spec)


def _mapped(spec: TensorSpec | None, convert: Callable[[QTensorConfig], Any]) -> Any:
    """Apply ``convert`` to all levels of ``spec``, which is a single level, a list of levels or None.

    Return the results in the same form.
    """
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
    """The quantization of one layer.

    The old name of this class is ``QuantizationConfig``. The value of a field for a tensor is a
    `QTensorConfig`, or a list of `QTensorConfig` for several levels. None leaves the tensor unquantized. You
    can assign to these fields. The value is checked immediately. A run works on a copy (`copied`).

    Attributes:
        input_tensors: Quantization of the input activations.
        output_tensors: Quantization of the output activations, such as keys and values of the KV cache.
        weight: Quantization of the weight.
        bias: Quantization of the bias.
        target_device: This field exists for compatibility with AMD Quark. It has no effect.

    Raises:
        ConfigError: (a ValueError) The value of a field has a wrong type. Or an activation is static and has
            a scale per group. This combination is not possible.
    """

    input_tensors: TensorSpec | None = attrs.field(default=None, converter=_as_spec, validator=_no_static_groups)
    output_tensors: TensorSpec | None = attrs.field(default=None, converter=_as_spec, validator=_no_static_groups)
    weight: TensorSpec | None = attrs.field(default=None, converter=_as_spec)
    bias: TensorSpec | None = attrs.field(default=None, converter=_as_spec)
    target_device: DeviceType | None = None

    def copied(self) -> QLayerConfig:
        """Return an independent copy. Raise ConfigError if values of the fields contradict each other."""
        slots: dict[str, Any] = {slot.value: _mapped(getattr(self, slot), QTensorConfig.copied) for slot in Slot}
        return attrs.evolve(self, **slots)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form. It has a key for every tensor, and None as the value for float tensors."""
        device = None if self.target_device is None else self.target_device.name
        return {slot.value: _mapped(getattr(self, slot), QTensorConfig.to_dict) for slot in Slot} | {"target_device": device}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> QLayerConfig:
        """Create a configuration from its JSON form. A missing key means None.

        Raise ConfigError if a key is unknown or a value has the wrong type.
        """
        unknown = sorted(set(checked(data, Mapping, "a layer's quantization")) - {*Slot, "target_device"})
        if unknown:
            raise ConfigError(f"a layer's quantization in JSON has unknown keys {unknown}; its keys are {', '.join(Slot)}, target_device")
        device = value_of(data, "target_device", str)
        return cls(
            **{s.value: _from_json(data.get(s)) for s in Slot}, target_device=None if device is None else DeviceType.from_str(device)
        )
