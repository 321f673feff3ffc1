"""The tensors that are written: codes, or rounded values, and scales of quantized layers; everything else unchanged."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from torch import Tensor, nn

from quark.calibration.activation_scales import kv_scale_groups, merge_kv_scales
from quark.checkpoint.exporter import ExportOptions
from quark.checkpoint.shard_writer import Part
from quark.config.slot import PARAMETERS, Slot
from quark.modules import QuantizedLayer, QuantizerModule
from quark.modules.attention import PROBABILITIES, QUERY, STATES
from quark.modules.packed_layers import packed_meta, stored_tensors
from quark.planning.plan import QuantPlan
from quark.planning.precedence import first_match
from quark.quantizers import QParams
from quark_exporters.quark_layout.tensor_names import checkpoint_name, probabilities_name, state_name
from quark_exporters.region import WHOLE, Region

__all__ = ["attention_quantizers", "holds_values", "is_tied_apart", "output_quantizers", "quantized_parts"]


def quantized_parts(model: nn.Module, plan: QuantPlan, options: ExportOptions, region: Region = WHOLE) -> list[Part]:
    """Return a part for each quantized layer and for each other tensor of a region, in the model's order."""
    modules = region.modules(model)
    layers = {name: m for name, m in modules.items() if isinstance(m, QuantizedLayer)}
    attention = attention_quantizers(modules)
    outputs = output_quantizers(model, plan, layers)
    merged = _merged_outputs(outputs, options)
    others = {f"{name}.{other}" for name, layer in layers.items() for other in layer.other_state()}
    plain = _plain_parts(region.state(model), [*layers, *attention], others)
    parts = (_layer_part(name, layer, options, outputs.get(name), merged.get(name)) for name, layer in layers.items())
    inside = [part for name, module in attention.items() for part in _probability_parts(name, module, options)]
    return [*plain, *parts, *inside, *_fused_state_parts(model, plan, layers, options)]


def is_tied_apart(model: nn.Module) -> bool:
    """Return whether the config ties input and output embeddings and quantization has given the head a weight of its own."""
    if not getattr(model.config, "tie_word_embeddings", False):
        return False
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    return head is not None and head.weight is not embedding.weight


def attention_quantizers(modules: Mapping[str, nn.Module]) -> dict[str, QuantizerModule]:
    """Return quantizers of attention modules by full name: of probabilities, and of states, whose scales are stored with projections."""
    return {n: m for n, m in modules.items() if isinstance(m, QuantizerModule) and n.rpartition(".")[2] in (PROBABILITIES, *STATES)}


def output_quantizers(model: nn.Module, plan: QuantPlan, layers: dict[str, QuantizedLayer]) -> dict[str, QuantizerModule]:
    """Return the quantizer of each layer's output: the layer's own, or the one inside attention; not those of fused projections."""
    states = [(a.name, state, layer) for a in plan.attentions if not a.fused for state, (layer, _) in a.states.items() if layer in layers]
    inside = {layer: getattr(model.get_submodule(attention), state) for attention, state, layer in states}
    quantizers = {name: inside.get(name, layer.output_quantizer) for name, layer in layers.items()}
    return {name: quantizer for name, quantizer in quantizers.items() if quantizer is not None}


def _fused_state_parts(model: nn.Module, plan: QuantPlan, layers: Mapping[str, QuantizedLayer], options: ExportOptions) -> Iterator[Part]:
    """Yield the parts of scales of queries, keys and values of fused projections, which are stored with the attention module."""
    for row in plan.attentions:
        here = [state for state, (layer, _) in row.states.items() if row.fused and layer in layers]
        states = {state: getattr(model.get_submodule(row.name), state) for state in here}
        cached = [q.scale for state, q in states.items() if state != QUERY and q.scale is not None and q.scale.numel() == 1]
        is_merged = any(first_match(layer, options.kv_cache_group) for layer, _ in row.states.values())
        merged = QParams(merge_kv_scales(cached, options.min_kv_scale)) if cached and is_merged else None
        tensors = {
            state_name(row.name, state, suffix): tensor
            for state, quantizer in states.items()
            for suffix, tensor in _activation(quantizer, None if state == QUERY else merged, options).items()
        }
        if tensors:
            yield Part({name: t.to("meta") for name, t in tensors.items()}, lambda tensors=tensors: tensors)  # type: ignore[misc]


def _probability_parts(name: str, module: QuantizerModule, options: ExportOptions) -> Iterator[Part]:
    attention, _, attribute = name.rpartition(".")
    tensors = (
        {probabilities_name(attention, s): t for s, t in _activation(module, None, options).items()} if attribute == PROBABILITIES else {}
    )
    if tensors:
        yield Part({n: t.to("meta") for n, t in tensors.items()}, lambda: tensors)


def _plain_parts(state: Mapping[str, Tensor], elsewhere: Iterable[str], others: Collection[str]) -> list[Part]:
    """Return parts of the tensors that are stored as they are: those that lie in no module of ``elsewhere``, and ``others``."""
    inside, seen = set(elsewhere), set()
    parts = []
    for name, tensor in state.items():
        # Tied parameters are one tensor under several names: readers expect it once, under the first.
        if (name not in others and _lies_in(name, inside)) or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        parts.append(Part({name: tensor.detach().to("meta")}, lambda n=name, t=tensor: {n: t}))  # type: ignore[misc]
    return parts


def _lies_in(name: str, modules: Collection[str]) -> bool:
    """Return whether a tensor belongs to one of the modules, or to a module inside of one. Takes the same time for any number of them."""
    end = name.rfind(".")
    while end > 0:
        if name[:end] in modules:
            return True
        end = name.rfind(".", 0, end)
    return False


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
        yield from ((checkpoint_name(name, slot, suffix), t) for suffix, t in packed.items() if _is_stored(suffix, quantizer, options))
    for slot, module in ((Slot.input_tensors, layer.input_quantizer), (Slot.output_tensors, output)):
        for suffix, t in _activation(module, None, options).items():
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
        for suffix, t in _activation(module, qparams, options).items():
            yield checkpoint_name(name, slot, suffix), t


def holds_values(options: ExportOptions) -> bool:
    """Return whether rounded values are stored, and not their codes."""
    return options.weight_format == "fake_quantized"


def _activation(module: QuantizerModule | None, qparams: QParams | None, options: ExportOptions) -> dict[str, Tensor]:
    """Stored scales of a static activation quantizer: ``qparams``, or its own where that is None."""
    stored = qparams or (module.qparams if module is not None else None)
    if module is None or stored is None:
        return {}
    packed = module.quantizer.pack_qparams(stored, order=options.pack_method)
    return {suffix: t for suffix, t in packed.items() if _is_stored(suffix, module, options)}


def _is_stored(suffix: str, module: QuantizerModule, options: ExportOptions) -> bool:
    return options.zero_points or not suffix.startswith("zero_point") or module.zero_point is not None


def _merged_outputs(outputs: dict[str, QuantizerModule], options: ExportOptions) -> dict[str, QParams]:
    """Cache scales that the options merge: for each attention the largest one, not below the floor, by the functions of calibration."""
    scales = {name: q.scale for name, q in outputs.items() if q.scale is not None and q.scale.numel() == 1}
    merged: dict[str, QParams] = {}
    for names in kv_scale_groups(scales, options.kv_cache_group):
        merged |= dict.fromkeys(names, QParams(merge_kv_scales([scales[n] for n in names], options.min_kv_scale)))
    return merged
