"""Slot: the four tensors of a layer that can be quantized, and their names elsewhere."""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property


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
