"""LayerShape: the shapes of a layer's tensors, as far as its weight tells them."""

from __future__ import annotations

from typing import Self

import attrs
from torch import Tensor, nn

from quark.config.slot import Slot
from quark.models.layers.layer_types import layer_type_of, layer_type_of_class
from quark.numbers import output_first_shape

__all__ = ["LayerShape"]


@attrs.frozen
class LayerShape:
    """The shapes of the tensors of a layer.

    Attributes:
        weight: Shape of the weight with its output channels first, however it is stored: ``[out, in]`` for a
            linear layer, ``[out, in / groups, *kernel]`` for a convolution, ``[tokens, features]`` for an
            embedding.
        groups: Of a convolution.
        is_transposed: Whether the float class keeps the weight ``[in, out / groups, …]``.
        is_lookup: Whether the input is indices.
    """

    weight: tuple[int, ...]
    groups: int = 1
    is_transposed: bool = False
    is_lookup: bool = False

    @classmethod
    def of(cls, layer: nn.Module) -> Self:
        """Return the shapes of a float layer that has a registered layer type.

        ``groups`` is its attribute of that name, or 1.
        """
        layer_type = layer_type_of_class(type(layer)) or layer_type_of(layer)
        is_transposed = layer_type is not None and layer_type.record.transposed
        groups = getattr(layer, "groups", 1)
        groups = groups if isinstance(groups, int) else 1
        stored: Tensor = layer.weight  # type: ignore[assignment]
        shape = tuple(stored.shape)
        weight = output_first_shape(shape, groups) if is_transposed else shape
        return cls(weight, groups, is_transposed, layer_type is not None and layer_type.record.lookup)

    @property
    def rank(self) -> int:
        """Number of axes of the weight."""
        return len(self.weight)

    def of_slot(self, slot: Slot) -> tuple[int, ...]:
        """Return the shape of a tensor as its quantizer sees it.

        Of a weight: as the quantized layer has it, ``[out, in]`` for linear layers and torch's layout for
        others. Of activations only the features are known before a run, at their place in a batch of one:
        ``[1, features]`` or ``[1, channels, 1, …]``; ``[1]`` for indices.
        """
        outputs, kernel = (self.weight[1:2] if self.is_lookup else self.weight[:1]), (1,) * (self.rank - 2)
        if slot is Slot.weight:
            is_exchanged = self.is_transposed and self.rank > 2
            return output_first_shape(self.weight, self.groups) if is_exchanged else self.weight
        if slot is Slot.bias:
            return outputs
        if slot is Slot.output_tensors:
            return (1, *outputs, *kernel)
        return (1,) if self.is_lookup else (1, *(size * self.groups for size in self.weight[1:2]), *kernel)
