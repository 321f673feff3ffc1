"""PlanRow: the configuration of one layer in a plan, and the rule that decided it."""

from __future__ import annotations

import attrs
from torch import nn

from quark.config.layer import QLayerConfig, Slot, TensorSpec
from quark.models.layers.coded_layer import packed_meta
from quark.models.layers.layer_types import LayerShape, layer_type_of_class
from quark.numbers import TensorQuantizer, quantizer_for
from quark.plugins import layer_types


@attrs.frozen
class PlanRow:
    """The plan of one layer.

    Attributes:
        name: Full module name.
        layer_type: Name of the layer's type in plans, a registered layer type: ``"linear"`` for all linear
            layers.
        shape: Shape of the weight with its output channels first, however it is stored; see `LayerShape`.
        config: Quantization of the layer; None if it stays float.
        reason: The rule that decided this.
        algorithm: Name of the algorithm that chooses the weight's codes, decided when the run is planned;
            None if they are rounded to nearest.
        tied_to: Full name of the module whose parameter this layer shares; None if there is none.
        groups: Groups of a convolution.
        same_as: First full name of the module, if this is a second name of it.
        shares_codes_of: Full name of the layer whose codes and scales are this layer's too, because both
            have one weight and one spec for it; None if the layer has its own.
        is_kept: Whether codes and scales are taken from the checkpoint, so that nothing is rounded.
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
    shares_codes_of: str | None = None

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
        """Whether the weight is quantized, and is a matrix ``[out, in]`` for algorithms for linear layers."""
        return self.has_quantized_weight and self.is_linear

    @property
    def has_codes_to_choose(self) -> bool:
        """Whether an algorithm may choose the codes of the weight.

        The weight must be a quantized matrix (not only cast) whose codes are not kept from the source. Codes
        shared with an embedding are rounded to nearest, because its inputs are indices without statistics.
        """
        if self.config is None or self.config.weight is None or self.is_kept or not self.is_linear or self.shares_codes_of is not None:
            return False
        return not quantizer_for(self.config.weight, activation=False).is_float

    @property
    def is_lookup(self) -> bool:
        """Whether the layer's input is indices, as an embedding's is."""
        return layer_types().get(self.layer_type).lookup

    @property
    def is_by_name(self) -> bool:
        """Whether the layer is quantized only if a pattern or a type names it.

        A configuration need not exclude it.
        """
        return layer_types().get(self.layer_type).by_name

    @property
    def shapes(self) -> LayerShape:
        """The shapes of the layer's tensors."""
        record = layer_types().get(self.layer_type)
        return LayerShape(self.shape, self.groups, record.transposed, record.lookup)

    def quantizer(self, slot: Slot, spec: TensorSpec) -> TensorQuantizer:
        """Return the quantizer of one of its tensors for some spec, from its layer type."""
        if self.is_linear:
            return quantizer_for(spec, activation=slot.is_activation)
        return layer_types().load_quantized(self.layer_type).quantizer_of(slot, spec, self.shapes)

    def shape_error(self, slot: Slot, spec: TensorSpec) -> str | None:
        """Return why one of its tensors cannot be quantized with some spec, or None."""
        return self.quantizer(slot, spec).shape_error(self.shapes.of_slot(slot))

    @property
    def weight_bytes(self) -> int:
        """The bytes of the codes and scales of a quantized weight in a checkpoint."""
        spec = self.quantized_to.weight
        assert spec is not None
        return sum(tensor.nbytes for tensor in packed_meta(self.quantizer(Slot.weight, spec), self.shape, "reorder").values())

    @property
    def quantized_to(self) -> QLayerConfig:
        """The configuration of a quantized layer.

        Raises ValueError for a row that is not among `QuantPlan.quantized`.
        """
        if self.config is None:
            raise ValueError(f"'{self.name}' stays float: it has no configuration")
        return self.config
