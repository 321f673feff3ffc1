"""Facts about the family of a model that was made from names: its blocks, and the layers that stay float."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import attrs
from torch import nn

from quark.base.names import folded
from quark.config.architecture import Architecture
from quark.config.templates import LLMTemplate
from quark.models.layers.quantized_layers import counts_as
from quark.models.plan.family import StatedFamily
from quark.plugins import templates
from quark_workbench.without_model.layer_kinds import is_of_a_tower, predicts_ahead
from quark_workbench.without_model.stacked_experts import StackedExperts

__all__ = ["family_of", "input_table", "output_head"]

_EXPERT_PARTS = "quark_workbench.without_model.stacked_experts:parts_of_stack"
_BLOCKS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_ROUTERS = ("*router*", "*.gate")
_HEADS = ("lm_head", "output", "embed_out", "head", "output_layer", "proj_out", "unembed")
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Ends of the names of layers that runtimes fuse, in most families."""


def input_table(model: nn.Module) -> Any:
    """Return the token embedding of a model.

    This is the embedding with as many rows as the vocabulary has tokens, or else the largest embedding.
    Return None if the model has no embedding.
    """
    config: Any = model.config
    rows = config.number("vocab_size", "padded_vocab_size")
    tables = [m for n, m in model.named_modules() if isinstance(m, nn.Embedding) and not (is_of_a_tower(n) or predicts_ahead(n))]
    return max(tables, key=lambda table: (table.num_embeddings == rows, table.num_embeddings), default=None)


def output_head(model: nn.Module) -> Any:
    """Return the linear layer that has the name of a head and as many outputs as there are token embeddings.

    Return None if there is no such layer.
    """
    embeddings = input_table(model)
    heads = (m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.rpartition(".")[2] in _HEADS and not predicts_ahead(n))
    return next((m for m in heads if embeddings is not None and m.out_features == embeddings.num_embeddings), None)


def family_of(model: nn.Module, floats: Mapping[str, Sequence[str]]) -> StatedFamily:
    """Return facts about a model that was made from names, and notes for the plan.

    If a template is registered for the model type, the template says which layers stay float. Otherwise these
    layers stay float: linear layers outside the blocks, routers, gates, and encoders of images and sound.
    Layers that predict more tokens than the next one always stay float.

    Args:
        model: The model.
        floats: Dictionary from a reason to names of tensors with two or more axes. For this reason, the
            tensors are not in a layer that can be quantized.
    """
    config: Any = model.config
    lists = [*_block_lists(model)]
    decoder = _decoder(model, lists)
    registered = _registered(config.name)
    facts = registered or Architecture(model_type=config.name, fused=_FUSED)
    head, embeddings = output_head(model), input_table(model)
    names = {module: name for name, module in model.named_modules()}
    ahead = [*_ahead(model, decoder)]
    own = [*([] if head is None else [names[head]]), *_routers(model)]
    own += _of_stored_names(registered, lists, decoder) if registered is not None else [*_left_in_float(model, lists, decoder)]
    facts = attrs.evolve(
        facts,
        decoder_blocks=decoder,
        encoder_blocks=tuple(name for name in lists if name != decoder),
        embeddings=(names[embeddings],) if embeddings is not None else (),
        head=None if head is None else names[head],
        experts=_experts(model, decoder) or facts.experts,
        expert_parts=_EXPERT_PARTS,
        exclude_layers_name=tuple(dict.fromkeys((*facts.exclude_layers_name, *own, *ahead))),
    )
    return StatedFamily(facts, tuple(_notes(model, facts, floats, ahead, is_known=registered is not None)))


def _registered(model_type: str) -> Architecture | None:
    """Return the facts that the template of a model type has, or None if there is no template.

    Some templates have only patterns; then the facts have only these patterns.
    """
    facts = templates().find_architecture(model_type)
    if facts is not None or model_type not in templates():
        return facts
    return Architecture(model_type=model_type, exclude_layers_name=LLMTemplate.get(model_type).exclude_layers_name, fused=_FUSED)


def _block_lists(model: nn.Module) -> Iterator[str]:
    """Yield the full names of the module lists whose modules are blocks with linear layers.

    A list inside another such list is left out.
    """
    outer: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or name.startswith(tuple(f"{one}." for one in outer)):
            continue
        if all(counts_as(block) is None for block in module) and any(counts_as(m) is nn.Linear for m in module.modules()):
            outer.append(name)
            yield name


def _decoder(model: nn.Module, lists: Sequence[str]) -> str | None:
    """Return the name of the list of decoder blocks, or None if there are no lists.

    It is the largest list that belongs neither to an encoder of images or sound nor to layers that predict
    more tokens. If all lists belong to these, it is the largest list.
    """
    sizes = {name: sum(p.numel() for p in model.get_submodule(name).parameters()) for name in lists}
    return max(lists, key=lambda name: (not (is_of_a_tower(name) or predicts_ahead(name)), sizes[name]), default=None)


def _left_in_float(model: nn.Module, lists: Sequence[str], decoder: str | None) -> Iterator[str]:
    """Yield full names and patterns of the layers that stay float if the family is unknown."""
    inside = tuple(f"{name}." for name in lists)
    layers = {name: module for name, module in model.named_modules() if counts_as(module) is not None}
    yield from (name for name in layers if not name.startswith(inside))
    yield from (f"{name}.*" for name in lists if is_of_a_tower(name) and name != decoder)
    gates = (n for n, m in layers.items() if isinstance(m, nn.Linear) and m.out_features == 1 and n.startswith(inside))
    yield from dict.fromkeys(map(_in_every_block, gates))


def _of_stored_names(registered: Architecture, lists: Sequence[str], decoder: str | None) -> list[str]:
    """Return further exclusion patterns, with which a template's exclusions fit the names in a checkpoint.

    Names in a checkpoint may lack the prefix ``model.``, so patterns without this prefix are added. If the
    template excludes an encoder of images or sound, patterns for all such encoders are added.
    """
    patterns = registered.exclude_layers_name
    towers = [f"{name}.*" for name in lists if is_of_a_tower(name) and name != decoder]
    stored = [p.removeprefix(stem) for stem in ("model.", "*.") for p in patterns if p.startswith(stem)]
    return stored + (towers if any(map(is_of_a_tower, patterns)) else [])


def _routers(model: nn.Module) -> Iterator[str]:
    """Yield patterns of routers.

    A layer is a router if it has the name of a router, or if it is beside experts and has an output for each
    expert.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    named = [pattern for pattern in _ROUTERS if any(fnmatchcase(name, pattern) for name in layers)]
    yield from named
    counts = {name: count for name, module in model.named_modules() if (count := _number_of_experts(name, module)) > 1}
    found = []
    for name, layer in layers.items():
        beside = (holder for holder, count in counts.items() if count == layer.out_features and not name.startswith(f"{holder}."))
        if any(name.startswith(f"{holder.rpartition('.')[0]}.") for holder in beside):
            found.append(name)
    yield from dict.fromkeys(map(_in_every_block, found))


def _number_of_experts(name: str, module: nn.Module) -> int:
    """Return the number of experts of a module, or 0 if it has no experts."""
    if isinstance(module, StackedExperts):
        return next(module.parameters()).shape[0]
    return len(module) if isinstance(module, nn.ModuleList) and "expert" in name.rpartition(".")[2].lower() else 0


def _in_every_block(name: str) -> str:
    """Return a pattern that matches a layer in all blocks: each number in the name becomes ``*``."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _ahead(model: nn.Module, decoder: str | None) -> Iterator[str]:
    """Yield patterns of the layers that predict more tokens than the next one.

    Their names show this, or their number is not less than the number of blocks in the config.
    """
    outermost: list[str] = []
    for name, _ in model.named_modules():
        if name and predicts_ahead(name) and not name.startswith(tuple(f"{one}." for one in outermost)):
            outermost.append(name)
            yield f"{name}*"
    config: Any = model.config
    blocks = config.number(*_BLOCKS)
    if decoder is not None and blocks is not None and 0 < blocks < (count := len(model.get_submodule(decoder)._modules)):
        yield from (f"{decoder}.{number}.*" for number in range(blocks, count))


def _experts(model: nn.Module, decoder: str | None) -> str | None:
    """Return the name of the module with the experts, relative to its block, or None without experts."""
    names = (name for name, _ in model.named_modules() if decoder is not None and name.startswith(f"{decoder}."))
    holder = next((name for name in names if name.rpartition(".")[2] == "experts"), None)
    return None if holder is None else holder.removeprefix(f"{decoder}.").partition(".")[2]


def _notes(
    model: nn.Module, facts: Architecture, floats: Mapping[str, Sequence[str]], ahead: Sequence[str], *, is_known: bool
) -> Iterator[str]:
    """Yield notes for the plan that say what was inferred from the names and shapes of tensors."""
    yield "made without the model class: names and shapes of tensors tell the layers"
    if not is_known:
        yield "no template is known: layers outside the blocks, routers and towers for images and sound stay float"
    tables = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    yield f"taken for embeddings: {folded(tables) or 'none'}; for the head: {facts.head or 'none'}"
    if ties := getattr(model, "all_tied_weights_keys", {}):
        yield f"taken for tied: {folded(f'{one} = {other}' for one, other in ties.items())}"
    if transposed := [name for name, module in model.named_modules() if type(module).__name__ == "Conv1D"]:
        yield f"stored [in, out], as the length of the biases shows: {folded(transposed)}"
    if ahead:
        yield f"predict more tokens, and stay float unless --layer names them: {folded(ahead)}"
    for why, names in floats.items():
        yield f"{len(names)} tensor(s) stay unchanged ({why}): {folded(names)}"
