"""The tensors that are written: codes, or rounded values, and scales of quantized layers; everything else unchanged."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from quark.checkpoint.exporter import ExportOptions
from quark.checkpoint.model_tensors import activation_tensors, attention_quantizers, holds_values, is_stored, plain_parts, state_parts
from quark.checkpoint.region import WHOLE, Region
from quark.checkpoint.shard_writer import Part
from quark.config.slot import PARAMETERS, Slot
from quark.modules import QuantizedLayer, QuantizerModule
from quark.modules.attention import PROBABILITIES
from quark.modules.packed_layers import packed_meta, stored_tensors
from quark.planning.kv_scales import kv_scale_groups, merge_kv_scales
from quark.planning.plan import QuantPlan
from quark.quantizers import QParams
from quark_exporters.quark_layout.tensor_names import checkpoint_name, probabilities_name

__all__ = ["output_quantizers", "quantized_parts"]


def quantized_parts(model: nn.Module, plan: QuantPlan, options: ExportOptions, region: Region = WHOLE) -> list[Part]:
    """Return a part for each quantized layer and for each other tensor of a region, in the model's order."""
    modules = region.modules(model)
    layers = {name: m for name, m in modules.items() if isinstance(m, QuantizedLayer)}
    attention = attention_quantizers(modules)
    outputs = output_quantizers(model, plan, layers)
    merged = _merged_outputs(outputs, options)
    others = {f"{name}.{other}" for name, layer in layers.items() for other in layer.other_state()}
    plain = plain_parts(region.state(model), [*layers, *attention], others)
    parts = (_layer_part(name, layer, options, outputs.get(name), merged.get(name)) for name, layer in layers.items())
    inside = [part for name, module in attention.items() for part in _probability_parts(name, module, options)]
    return [*plain, *parts, *inside, *state_parts(model, [row for row in plan.attentions if row.fused], layers, options)]


def output_quantizers(model: nn.Module, plan: QuantPlan, layers: dict[str, QuantizedLayer]) -> dict[str, QuantizerModule]:
    """Return the quantizer of each layer's output: the layer's own, or the one inside attention; not those of fused projections."""
    states = [(a.name, state, layer) for a in plan.attentions if not a.fused for state, (layer, _) in a.states.items() if layer in layers]
    inside = {layer: getattr(model.get_submodule(attention), state) for attention, state, layer in states}
    quantizers = {name: inside.get(name, layer.output_quantizer) for name, layer in layers.items()}
    return {name: quantizer for name, quantizer in quantizers.items() if quantizer is not None}


def _probability_parts(name: str, module: QuantizerModule, options: ExportOptions) -> Iterator[Part]:
    attention, _, attribute = name.rpartition(".")
    tensors = (
        {probabilities_name(attention, s): t for s, t in activation_tensors(module, None, options).items()}
        if attribute == PROBABILITIES
        else {}
    )
    if tensors:
        yield Part({n: t.to("meta") for n, t in tensors.items()}, lambda: tensors)


def _layer_part(name: str, layer: QuantizedLayer, options: ExportOptions, output: QuantizerModule | None, merged: QParams | None) -> Part:
    meta = dict(_meta(name, layer, options, output))
    return Part(meta, lambda: {n: t for n, t in _tensors(name, layer, options, output, merged) if n in meta})


def _meta(name: str, layer: QuantizedLayer, options: ExportOptions, output: QuantizerModule | None) -> Iterator[tuple[str, Tensor]]:
    for slot in PARAMETERS:
        tensor = getattr(layer, slot, None)
        if tensor is None:
            continue
        quantizer: QuantizerModule | None = getattr(layer, slot.quantizer_attribute)
        if quantizer is None:
            yield checkpoint_name(name, slot, ""), layer.as_stored(tensor.detach()).to("meta")
            continue
        packed = packed_meta(quantizer.quantizer, tuple(tensor.shape), options.pack_method)
        packed[""] = layer.as_stored(tensor.detach().to("meta") if holds_values(options) else packed[""])
        yield from ((checkpoint_name(name, slot, suffix), t) for suffix, t in packed.items() if is_stored(suffix, quantizer, options))
    for slot, module in ((Slot.input_tensors, layer.input_quantizer), (Slot.output_tensors, output)):
        for suffix, t in activation_tensors(module, None, options).items():
            yield checkpoint_name(name, slot, suffix), t.to("meta")


def _tensors(
    name: str, layer: QuantizedLayer, options: ExportOptions, output: QuantizerModule | None, merged: QParams | None
) -> Iterator[tuple[str, Tensor]]:
    for slot in PARAMETERS:
        tensor = getattr(layer, slot, None)
        quantizer: QuantizerModule | None = getattr(layer, slot.quantizer_attribute)
        if tensor is None:
            continue
        if quantizer is None or quantizer.qparams is None:
            yield checkpoint_name(name, slot, ""), layer.as_stored(tensor)
            continue
        if holds_values(options):
            packed = {"": tensor.detach(), **quantizer.quantizer.pack_qparams(quantizer.qparams, order=options.pack_method)}
        else:
            packed = stored_tensors(f"{name}.{slot}", quantizer, tensor, options.pack_method)
        packed[""] = layer.as_stored(packed[""])
        yield from ((checkpoint_name(name, slot, suffix), t) for suffix, t in packed.items())
    for slot, module, qparams in ((Slot.input_tensors, layer.input_quantizer, None), (Slot.output_tensors, output, merged)):
        for suffix, t in activation_tensors(module, qparams, options).items():
            yield checkpoint_name(name, slot, suffix), t


def _merged_outputs(outputs: dict[str, QuantizerModule], options: ExportOptions) -> dict[str, QParams]:
    """Cache scales that the options merge: for each attention the largest one, not below the floor, by the functions of calibration."""
    scales = {name: q.scale for name, q in outputs.items() if q.scale is not None and q.scale.numel() == 1}
    merged: dict[str, QParams] = {}
    for names in kv_scale_groups(scales, options.kv_cache_group):
        merged |= dict.fromkeys(names, QParams(merge_kv_scales([scales[n] for n in names], options.min_kv_scale)))
    return merged
