"""`ExportedLayer`, which converts a quantized layer to tensors of a checkpoint, and tensors to a layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Self

import attrs
import torch
from torch import Tensor, nn

from quark.checkpoint.exporter import ExportOptions
from quark.checkpoint.layer_storage import LayerStorage, meta_tensors
from quark.checkpoint.model_tensors import activation_tensors, is_stored, scale_suffixes
from quark.config.layer import ACTIVATIONS, QLayerConfig, Slot
from quark.models.layers import QuantizedLayer, QuantizerModule
from quark.models.layers.coded_layer import CodedLayer, as_parameter, checked_codes, packed_meta, restore, stored_tensors
from quark.models.layers.layer_types import LayerShape
from quark.models.plan.kv_scales import kv_scale_groups, merge_kv_scales
from quark.models.plan.quant_plan import QuantPlan
from quark.numbers import QParams


@attrs.frozen(eq=False)
class ExportedLayer:
    """A quantized layer whose tensors are announced, written or read back.

    To announce tensors means to return meta tensors with their names, shapes and dtypes before they exist.

    Attributes:
        name: Full name of the layer.
        layer: The layer. When tensors are read, the layer has a float weight, and quantizers without scales.
        options: Options of the export.
        output: The quantizer of the layer's output. The quantizer belongs to the layer or to an attention
            module. None if the output stays float.
        merged_output: The scale that the output of this layer shares with the outputs of other layers because
            of ``options.kv_cache_group``. None if the output has a scale of its own.
        is_meta: Whether the tensors are only announced. If so, all tensors are on the meta device.
    """

    name: str
    layer: QuantizedLayer
    options: ExportOptions
    output: QuantizerModule | None = None
    merged_output: QParams | None = None
    is_meta: bool = False

    @property
    def config(self) -> QLayerConfig:
        """The quantization of each tensor of the layer."""
        return self.layer.layer_config

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return tuple(self._weight.shape)

    @property
    def device(self) -> torch.device:
        """The device of the weight."""
        return self._weight.device

    @property
    def _weight(self) -> Tensor:
        weight = self.layer.weight
        assert isinstance(weight, Tensor)
        return weight

    def is_quantized(self, slot: Slot) -> bool:
        """Return whether the tensor ``slot`` of the layer is quantized."""
        return self._quantizer(slot) is not None

    def on_meta(self) -> Self:
        """Return a copy of this object whose tensors are on the meta device."""
        return attrs.evolve(self, is_meta=True)

    def packed(self, slot: Slot) -> dict[str, Tensor]:
        """Return the packed tensors of a slot, as a dictionary from suffix to tensor.

        The suffix ``""`` is for codes or values. Other suffixes, such as ``"scale"``, are for scales and zero
        points. For an activation, the result contains only static scales. If the layer has no tensor
        ``slot``, the result is empty.

        Raises:
            ConfigError, PluginError: For the same reasons as in `quark.checkpoint.stored_tensors`.
        """
        quantizer = self._quantizer(slot)
        if slot in ACTIVATIONS:
            merged = self.merged_output if slot is Slot.output_tensors and not self.is_meta else None
            tensors = activation_tensors(quantizer, merged, self.options)
            return {suffix: t.to("meta") for suffix, t in tensors.items()} if self.is_meta else tensors
        tensor: Tensor | None = getattr(self.layer, slot, None)
        if tensor is None:
            return {}
        order, values = self.options.pack_method, {"": tensor.detach().to("meta") if self.is_meta else tensor}
        if quantizer is None or (quantizer.qparams is None and not self.is_meta):
            packed = values
        elif self.is_meta:
            packed = packed_meta(quantizer.quantizer, tuple(tensor.shape), order) | (values if self.options.stores_values else {})
        elif self.options.stores_values:
            assert quantizer.qparams is not None
            packed = {"": tensor.detach(), **quantizer.quantizer.pack_qparams(quantizer.qparams, order=order)}
        else:
            packed = stored_tensors(f"{self.name}.{slot}", quantizer, tensor, order)
        packed[""] = self.layer.as_stored(packed[""])
        return {suffix: t for suffix, t in packed.items() if quantizer is None or is_stored(suffix, quantizer, self.options)}

    def suffixes(self, slot: Slot) -> Iterator[str]:
        """Yield the suffixes of the tensors that `packed` may return for a slot.

        This also works if the layer has no scales yet.
        """
        quantizer = self._quantizer(slot)
        if slot in ACTIVATIONS:
            yield from scale_suffixes(quantizer, self.options, LayerShape.of(self.layer).of_slot(slot))
        elif (tensor := getattr(self.layer, slot, None)) is not None:
            yield from ("",) if quantizer is None else packed_meta(quantizer.quantizer, tuple(tensor.shape), self.options.pack_method)

    def set_packed(self, slot: Slot, tensors: Mapping[str, Tensor]) -> None:
        """Set a tensor of the layer and its scales from written tensors. This is the inverse of `packed`.

        Args:
            slot: The tensor of the layer to set.
            tensors: A dictionary from suffix to written tensor, on any device.
        """
        quantizer, order = self._quantizer(slot), self.options.pack_method
        if slot in ACTIVATIONS:
            if quantizer is not None and quantizer.is_static:
                shape = LayerShape.of(self.layer).of_slot(slot)
                restore(quantizer, slot, tensors, shape, self.layer.weight.dtype, order, self.name)  # type: ignore[arg-type]
            return
        parameter: Tensor | None = getattr(self.layer, slot)
        if parameter is None:
            return
        stored = {suffix: tensor.to(parameter.device) for suffix, tensor in tensors.items()}
        stored[""] = self.layer.as_stored(stored[""])
        if quantizer is None:
            self.layer._parameters[slot] = as_parameter(stored[""].to(parameter.dtype))
            return
        shape, holds_values = tuple(parameter.shape), self.options.stores_values
        restored = restore(quantizer, slot, stored, shape, parameter.dtype, order, self.name, holds_values=holds_values)
        self.layer._parameters |= restored

    def coded(self) -> CodedLayer:
        """Return the codes and scales of the layer. The layer must be linear and have a quantized weight.

        Layouts that pack codes in their own way call this method.

        Raises:
            ConfigError: The weight is not on the grid, because it was changed after rounding.
        """
        if self.is_meta:
            return CodedLayer.empty(self.config, self.shape)
        quantizer, inputs = self.layer.weight_quantizer, self.layer.input_quantizer
        assert quantizer is not None
        assert quantizer.qparams is not None
        codes = checked_codes(f"{self.name}.weight", quantizer, self._weight)
        return CodedLayer(self.config, codes, quantizer.qparams, inputs.qparams if inputs is not None and inputs.is_static else None)

    def stored_by(self, storage: LayerStorage) -> Mapping[str, Tensor]:
        """Return the tensors that ``storage`` stores for the layer, as a dictionary from name to tensor.

        The names are relative to the layer. The result is empty if the weight of the layer is float.
        """
        if not self.is_quantized(Slot.weight):
            return {}
        return meta_tensors(storage, self.config, self.shape) if self.is_meta else storage.stored(self.coded())

    def _quantizer(self, slot: Slot) -> QuantizerModule | None:
        """Return the quantizer of the tensor ``slot``, or None if this tensor stays float."""
        if slot is Slot.output_tensors:
            return self.output
        return getattr(self.layer, slot.quantizer_attribute)


def exported_layers(
    model: nn.Module, plan: QuantPlan, options: ExportOptions, modules: Mapping[str, nn.Module]
) -> dict[str, ExportedLayer]:
    """Return a dictionary from the full name of each quantized layer in ``modules`` to an `ExportedLayer`."""
    layers = {name: m for name, m in modules.items() if isinstance(m, QuantizedLayer)}
    states = [(a.name, state, layer) for a in plan.attentions if not a.fused for state, (layer, _) in a.states.items() if layer in layers]
    inside = {layer: getattr(model.get_submodule(attention), state) for attention, state, layer in states}
    outputs: dict[str, QuantizerModule | None] = {name: inside.get(name, layer.output_quantizer) for name, layer in layers.items()}
    merged = _merged_outputs(outputs, options)
    return {name: ExportedLayer(name, layer, options, outputs[name], merged.get(name)) for name, layer in layers.items()}


def _merged_outputs(outputs: Mapping[str, QuantizerModule | None], options: ExportOptions) -> dict[str, QParams]:
    """Return the scales that layers share because of ``options.kv_cache_group``.

    The result is a dictionary from the full name of a layer to the shared scale. Layers of one attention
    module share the largest of their scales, or ``options.min_kv_scale`` if this value is larger.
    """
    scales = {name: q.scale for name, q in outputs.items() if q is not None and q.scale is not None and q.scale.ndim == 0}
    merged: dict[str, QParams] = {}
    for names in kv_scale_groups(scales, options.kv_cache_group):
        merged |= dict.fromkeys(names, QParams(merge_kv_scales([scales[n] for n in names], options.min_kv_scale)))
    return merged
