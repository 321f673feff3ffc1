"""ExportedLayer: a quantized layer on its way into a checkpoint or back, as packed tensors or codes."""

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

    Attributes:
        name: Its full name.
        layer: The layer. For reading, it has quantizers without scales, and float weights.
        options: Options of the export.
        output: The quantizer of its output: its own, or one inside attention; None if the output stays float.
        merged_output: The scale that its output shares with others by ``options.kv_cache_group``; None if it
            has its own.
        is_meta: Whether the tensors are only announced; then all are on the meta device.
    """

    name: str
    layer: QuantizedLayer
    options: ExportOptions
    output: QuantizerModule | None = None
    merged_output: QParams | None = None
    is_meta: bool = False

    @property
    def config(self) -> QLayerConfig:
        """The quantization of each of its tensors."""
        return self.layer.layer_config

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its weight."""
        return tuple(self._weight.shape)

    @property
    def device(self) -> torch.device:
        """The device of its weight."""
        return self._weight.device

    @property
    def _weight(self) -> Tensor:
        weight = self.layer.weight
        assert isinstance(weight, Tensor)
        return weight

    def is_quantized(self, slot: Slot) -> bool:
        """Return whether a tensor of the layer is quantized."""
        return self._quantizer(slot) is not None

    def on_meta(self) -> Self:
        """Return the same layer with tensors on the meta device."""
        return attrs.evolve(self, is_meta=True)

    def packed(self, slot: Slot) -> dict[str, Tensor]:
        """Return the packed tensors of a slot by suffix: ``""`` for codes or values, ``"scale"``, …

        Empty if the layer has no such tensor. An activation has only scales, if they are static.

        Raises:
            ConfigError, PluginError: As `quark.checkpoint.stored_tensors` does.
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
        """Yield the suffixes of tensors that `packed` may return for a slot; the layer may lack scales."""
        quantizer = self._quantizer(slot)
        if slot in ACTIVATIONS:
            yield from scale_suffixes(quantizer, self.options, LayerShape.of(self.layer).of_slot(slot))
        elif (tensor := getattr(self.layer, slot, None)) is not None:
            yield from ("",) if quantizer is None else packed_meta(quantizer.quantizer, tuple(tensor.shape), self.options.pack_method)

    def set_packed(self, slot: Slot, tensors: Mapping[str, Tensor]) -> None:
        """Set a tensor of the layer, and its scales, to the written tensors: the inverse of `packed`.

        Args:
            slot: The tensor.
            tensors: Tensors by suffix, on any device.
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
        """Return the codes and scales of a linear layer with a quantized weight.

        Layouts that pack codes in their own way use these.

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
        """Return the tensors as a storage packs them, by the last part of their names.

        Empty for a layer whose weight is float.
        """
        if not self.is_quantized(Slot.weight):
            return {}
        return meta_tensors(storage, self.config, self.shape) if self.is_meta else storage.stored(self.coded())

    def _quantizer(self, slot: Slot) -> QuantizerModule | None:
        if slot is Slot.output_tensors:
            return self.output
        return getattr(self.layer, slot.quantizer_attribute)


def exported_layers(
    model: nn.Module, plan: QuantPlan, options: ExportOptions, modules: Mapping[str, nn.Module]
) -> dict[str, ExportedLayer]:
    """Return the quantized layers among some modules of a model, by full name."""
    layers = {name: m for name, m in modules.items() if isinstance(m, QuantizedLayer)}
    states = [(a.name, state, layer) for a in plan.attentions if not a.fused for state, (layer, _) in a.states.items() if layer in layers]
    inside = {layer: getattr(model.get_submodule(attention), state) for attention, state, layer in states}
    outputs: dict[str, QuantizerModule | None] = {name: inside.get(name, layer.output_quantizer) for name, layer in layers.items()}
    merged = _merged_outputs(outputs, options)
    return {name: ExportedLayer(name, layer, options, outputs[name], merged.get(name)) for name, layer in layers.items()}


def _merged_outputs(outputs: Mapping[str, QuantizerModule | None], options: ExportOptions) -> dict[str, QParams]:
    """Return the merged scales of the KV cache by full name of the layer, as the options ask.

    Layers of one attention get its largest scale, or ``min_kv_scale`` if that is larger.
    """
    scales = {name: q.scale for name, q in outputs.items() if q is not None and q.scale is not None and q.scale.ndim == 0}
    merged: dict[str, QParams] = {}
    for names in kv_scale_groups(scales, options.kv_cache_group):
        merged |= dict.fromkeys(names, QParams(merge_kv_scales([scales[n] for n in names], options.min_kv_scale)))
    return merged
