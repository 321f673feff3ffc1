"""`PlanRow` is the part of a plan that describes one layer."""

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
        name: Full name of the layer.
        layer_type: The registered name of the layer type that plans use. It is ``"linear"`` for all linear
            layers.
        shape: Shape of the weight. The first axis is the output channels, like in
            `quark.models.layers.layer_types.LayerShape`.
        config: Quantization of the layer. None means that the layer stays float.
        reason: A text that names the rule that decided the quantization.
        algorithm: Name of the algorithm that chooses the codes of the weight. It is set when the run is
            planned. None means that the weight is rounded to nearest.
        tied_to: Full name of the first layer that has the same weight parameter as this layer. None if this
            layer is the first or only layer with the parameter.
        groups: Number of groups of a convolution. It is 1 for other layers.
        same_as: If the module has several full names and ``name`` is not the first of them, the first full
            name. Otherwise None.
        shares_codes_of: Full name of the layer whose codes and scales this layer uses. Both layers then share
            a weight and have the same spec for it. None if this layer has its own codes.
        is_kept: Whether the codes and scales are copied from the source checkpoint, so that nothing is
            rounded.
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
        """Whether the plan treats the layer as an ``nn.Linear``. Algorithms for linear layers then apply."""
        linear = layer_type_of_class(nn.Linear)
        return linear is not None and self.layer_type == linear.planned_name

    @property
    def has_quantized_weight(self) -> bool:
        """Whether the weight is quantized."""
        return self.config is not None and self.config.weight is not None

    @property
    def has_quantized_matrix(self) -> bool:
        """Whether the layer is linear and its weight, a matrix with the shape ``[out, in]``, is quantized."""
        return self.has_quantized_weight and self.is_linear

    @property
    def has_codes_to_choose(self) -> bool:
        """Whether an algorithm may choose the codes of the weight.

        The value is True for a quantized matrix, except in three cases: the weight is only cast to another
        dtype, the layer keeps its codes from the source, or the layer shares its codes with another layer. In
        the last case, the other layer is usually an embedding, and there are no statistics for its inputs,
        which are indices.
        """
        if self.config is None or self.config.weight is None or self.is_kept or not self.is_linear or self.shares_codes_of is not None:
            return False
        return not quantizer_for(self.config.weight, activation=False).is_float

    @property
    def is_lookup(self) -> bool:
        """Whether the input of the layer consists of indices, like the input of an embedding."""
        return layer_types().get(self.layer_type).lookup

    @property
    def is_by_name(self) -> bool:
        """Whether the layer is quantized only if the configuration names it by a pattern or by its type.

        A configuration does not need to exclude such a layer.
        """
        return layer_types().get(self.layer_type).by_name

    @property
    def shapes(self) -> LayerShape:
        """The shapes of the layer's tensors."""
        record = layer_types().get(self.layer_type)
        return LayerShape(self.shape, self.groups, record.transposed, record.lookup)

    def quantizer(self, slot: Slot, spec: TensorSpec) -> TensorQuantizer:
        """Return the quantizer that the layer type uses for a tensor of the layer with the spec ``spec``."""
        if self.is_linear:
            return quantizer_for(spec, activation=slot.is_activation)
        return layer_types().load_quantized(self.layer_type).quantizer_of(slot, spec, self.shapes)

    def shape_error(self, slot: Slot, spec: TensorSpec) -> str | None:
        """Return the reason why a tensor of the layer cannot be quantized with ``spec``, or None."""
        return self.quantizer(slot, spec).shape_error(self.shapes.of_slot(slot))

    @property
    def weight_bytes(self) -> int:
        """The number of bytes that the codes and scales of the quantized weight need in a checkpoint."""
        spec = self.quantized_to.weight
        assert spec is not None
        return sum(tensor.nbytes for tensor in packed_meta(self.quantizer(Slot.weight, spec), self.shape, "reorder").values())

    @property
    def quantized_to(self) -> QLayerConfig:
        """The configuration of the layer, which must not be None.

        Raises:
            ValueError: The configuration is None, because the layer stays float.
        """
        if self.config is None:
            raise ValueError(f"'{self.name}' stays float: it has no configuration")
        return self.config
