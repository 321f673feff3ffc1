"""PlanRow: the configuration of one layer in a plan, and the rule that decided it."""

from __future__ import annotations

import attrs
from torch import nn

from quark.config.layer import QLayerConfig, TensorSpec
from quark.config.slot import Slot
from quark.models.layers.layer_types import LayerShape, layer_type_of_class
from quark.numbers import TensorQuantizer, quantizer_for
from quark.plugins import layer_types


@attrs.frozen
class PlanRow:
    """The plan of one layer.

    Attributes:
        name: Full module name.
        layer_type: Name of the registered layer type as which the layer is planned: ``"linear"`` for all
            linear layers.
        shape: Shape of the weight with its output channels first, however it is stored; see `LayerShape`.
        config: How the layer is quantized; None where it stays float.
        reason: The rule that decided this.
        algorithm: Name of the algorithm that chooses the weight's codes, decided when the run is planned;
            None where they are rounded to nearest.
        tied_to: Full name of the module whose parameter this one shares; None where it shares none.
        groups: Of a convolution.
        same_as: First full name of the module, if this is another name of it: one module at two places.
        is_kept: Whether codes and scales are those that the checkpoint stores, so that nothing is rounded.
    """

    name: str
    layer_type: str
    shape: tuple[int, ...]
    config: QLayerConfig | None
    reason: str
    tied_to: str | None = None
    algorithm: str | None = None
    groups: int = 1
    is_kept: bool = False
    same_as: str | None = None

    @property
    def is_linear(self) -> bool:
        """Whether the layer is planned as ``nn.Linear``, so that algorithms for linear layers apply."""
        linear = layer_type_of_class(nn.Linear)
        return linear is not None and self.layer_type == linear.planned_name

    @property
    def has_quantized_weight(self) -> bool:
        """Whether the weight is quantized."""
        return self.config is not None and self.config.weight is not None

    @property
    def has_quantized_matrix(self) -> bool:
        """Whether the weight is quantized, and is a matrix ``[out, in]``.

        Algorithms for linear layers work on it.
        """
        return self.has_quantized_weight and self.is_linear

    @property
    def has_codes_to_choose(self) -> bool:
        """Whether an algorithm may choose the codes of the weight.

        That is a quantized matrix, not merely cast, whose codes are not stored yet.
        """
        if self.config is None or self.config.weight is None or self.is_kept or not self.is_linear:
            return False
        return not quantizer_for(self.config.weight, activation=False).is_float

    @property
    def is_lookup(self) -> bool:
        """Whether the layer's input is indices, as an embedding's is."""
        return layer_types().get(self.layer_type).lookup

    @property
    def is_by_name(self) -> bool:
        """Whether the layer is quantized only where a pattern or a type names it.

        A configuration need not exclude it.
        """
        return layer_types().get(self.layer_type).by_name

    @property
    def shapes(self) -> LayerShape:
        """The shapes of the layer's tensors."""
        record = layer_types().get(self.layer_type)
        return LayerShape(self.shape, self.groups, record.transposed, record.lookup)

    def quantizer(self, slot: Slot, spec: TensorSpec) -> TensorQuantizer:
        """Return the quantizer of one of its tensors for some spec, as its layer type gives it."""
        if self.is_linear:
            return quantizer_for(spec, activation=slot.is_activation)
        return layer_types().load_quantized(self.layer_type).quantizer_of(slot, spec, self.shapes)

    def shape_error(self, slot: Slot, spec: TensorSpec) -> str | None:
        """Return why one of its tensors cannot be quantized by some spec; None where it can."""
        return self.quantizer(slot, spec).shape_error(self.shapes.of_slot(slot))

    @property
    def quantized_to(self) -> QLayerConfig:
        """The configuration of a quantized layer.

        Raises ValueError for a row that is not among `QuantPlan.quantized`.
        """
        if self.config is None:
            raise ValueError(f"'{self.name}' stays float: it has no configuration")
        return self.config
