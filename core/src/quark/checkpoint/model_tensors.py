"""Tensors of a quantized model that several layouts write alike: those that are not quantized, and scales of activations and attention."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from torch import Tensor, nn

from quark.checkpoint.exporter import ExportOptions
from quark.checkpoint.shard_writer import Part
from quark.modules import QuantizerModule
from quark.modules.attention import PROBABILITIES, QUERY, STATES, STORED_STATES
from quark.planning.attention import AttentionRow
from quark.planning.kv_scales import merge_kv_scales
from quark.planning.precedence import first_match
from quark.quantizers import QParams

__all__ = [
    "activation_tensors",
    "attention_quantizers",
    "holds_values",
    "is_stored",
    "is_tied_apart",
    "plain_parts",
    "state_name",
    "state_parts",
]


def is_tied_apart(model: nn.Module) -> bool:
    """Return whether the config ties input and output embeddings and quantization has given the head a weight of its own."""
    if not getattr(model.config, "tie_word_embeddings", False):
        return False
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    return head is not None and head.weight is not embedding.weight


def attention_quantizers(modules: Mapping[str, nn.Module]) -> dict[str, QuantizerModule]:
    """Return quantizers of attention modules by full name: of probabilities, and of states, whose scales are stored with projections."""
    return {n: m for n, m in modules.items() if isinstance(m, QuantizerModule) and n.rpartition(".")[2] in (PROBABILITIES, *STATES)}


def state_name(attention: str, state: str, suffix: str) -> str:
    """Return the name of a tensor of queries, keys or values stored with attention: ``….self_attn`` + keys + scale → ``….k_scale``."""
    return f"{attention}.{STORED_STATES[state]}_{suffix}"


def state_parts(model: nn.Module, attentions: Iterable[AttentionRow], layers: Collection[str], options: ExportOptions) -> Iterator[Part]:
    """Yield the parts of scales of queries, keys and values that are stored with the attention module.

    Args:
        model: The quantized model.
        attentions: The attention modules whose states are stored so.
        layers: Names of the quantized layers of the region that is written.
        options: Of the export.
    """
    for row in attentions:
        here = [state for state, (layer, _) in row.states.items() if layer in layers]
        states = {state: getattr(model.get_submodule(row.name), state) for state in here}
        cached = [q.scale for state, q in states.items() if state != QUERY and q.scale is not None and q.scale.numel() == 1]
        is_merged = any(first_match(layer, options.kv_cache_group) for layer, _ in row.states.values())
        merged = QParams(merge_kv_scales(cached, options.min_kv_scale)) if cached and is_merged else None
        tensors = {
            state_name(row.name, state, suffix): tensor
            for state, quantizer in states.items()
            for suffix, tensor in activation_tensors(quantizer, None if state == QUERY else merged, options).items()
        }
        if tensors:
            yield Part({name: t.to("meta") for name, t in tensors.items()}, lambda tensors=tensors: tensors)  # type: ignore[misc]


def plain_parts(state: Mapping[str, Tensor], elsewhere: Iterable[str], others: Collection[str]) -> list[Part]:
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


def activation_tensors(module: QuantizerModule | None, qparams: QParams | None, options: ExportOptions) -> dict[str, Tensor]:
    """Return the stored scales of a static activation quantizer: ``qparams``, or its own where that is None."""
    stored = qparams or (module.qparams if module is not None else None)
    if module is None or stored is None:
        return {}
    packed = module.quantizer.pack_qparams(stored, order=options.pack_method)
    return {suffix: t for suffix, t in packed.items() if is_stored(suffix, module, options)}


def is_stored(suffix: str, module: QuantizerModule, options: ExportOptions) -> bool:
    """Return whether a tensor with that suffix is written: zero points that are all 0 may be left out."""
    return options.zero_points or not suffix.startswith("zero_point") or module.zero_point is not None


def holds_values(options: ExportOptions) -> bool:
    """Return whether rounded values are stored, and not their codes."""
    return options.weight_format == "fake_quantized"
