"""Facts of the dense families, each checked on a tiny randomly initialised model of transformers."""

from __future__ import annotations

from copy import deepcopy
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

import quark
from quark.config.architecture import Architecture
from quark.models.layers import counts_as
from quark_templates.plugin import DENSE

IDS = torch.arange(3, 11).unsqueeze(0)


def blocks_of(model: nn.Module, facts: Architecture) -> nn.ModuleList:
    blocks = model.get_submodule(facts.decoder_blocks or "")
    assert isinstance(blocks, nn.ModuleList)
    return blocks


def linears(module: nn.Module) -> dict[str, nn.Module]:
    return {name: m for name, m in module.named_modules() if counts_as(m) is nn.Linear}


def inputs_and_outputs(
    module: nn.Module, names: list[str], model: nn.Module
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Any]:
    """Return inputs and outputs of some submodules in one forward pass of ``model``, and the KV cache."""
    came_in: dict[str, torch.Tensor] = {}
    went_out: dict[str, torch.Tensor] = {}

    def watch(name: str) -> torch.utils.hooks.RemovableHandle:
        def hook(_: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            came_in[name], went_out[name] = args[0], output

        return module.get_submodule(name).register_forward_hook(hook)

    handles = [watch(name) for name in names]
    with torch.no_grad():
        cache = model(IDS, use_cache=True).past_key_values
    for handle in handles:
        handle.remove()
    return came_in, went_out, cache


def test_each_family_is_listed_as_a_template() -> None:
    assert set(DENSE) <= set(quark.templates().names())


def test_embeddings_and_head_are_those_of_transformers(family: tuple[nn.Module, Architecture]) -> None:
    model, facts = family
    assert [model.get_submodule(name) for name in facts.embeddings] == [model.get_input_embeddings()]
    assert model.get_submodule(facts.head or "") is model.get_output_embeddings()


def test_the_final_norm_feeds_the_head(family: tuple[nn.Module, Architecture]) -> None:
    model, facts = family
    norm, head = facts.final_norm or "", facts.head or ""
    came_in, went_out, _ = inputs_and_outputs(model, [norm, head], model)
    assert torch.equal(came_in[head], went_out[norm])


def test_every_linear_of_a_block_is_named_once(family: tuple[nn.Module, Architecture]) -> None:
    model, facts = family
    known = [*facts.attention_inputs, facts.attention_output, *facts.mlp_inputs, facts.mlp_output]
    for block in blocks_of(model, facts):
        assert sorted(known) == sorted(linears(block))


def test_every_linear_outside_the_blocks_is_excluded(family: tuple[nn.Module, Architecture]) -> None:
    model, facts = family
    outside = [name for name in linears(model) if not name.startswith(f"{facts.decoder_blocks}.")]
    assert outside == [facts.head]
    assert all(any(fnmatchcase(name, p) for p in facts.exclude_layers_name) for name in outside)


def test_every_pattern_matches(family: tuple[nn.Module, Architecture]) -> None:
    model, facts = family
    q_patterns = (facts.q_layer_name,) if isinstance(facts.q_layer_name, str) else facts.q_layer_name or ()
    for pattern in (*(facts.kv_layers_name or ()), *q_patterns, *facts.exclude_layers_name):
        assert any(fnmatchcase(name, pattern) for name in linears(model)), pattern


def test_cache_patterns_match_attention_inputs_only_and_once_per_block_each(family: tuple[nn.Module, Architecture]) -> None:
    model, facts = family
    for pattern in facts.kv_layers_name or ():
        found = [name for name in linears(model) if fnmatchcase(name, pattern)]
        assert len(found) == model.config.num_hidden_layers
        assert all(name.endswith(facts.attention_inputs) for name in found)


def test_kv_layers_put_out_what_the_cache_holds(family: tuple[nn.Module, Architecture]) -> None:
    """Values are cached as the projection gives them.

    Keys are rotated first, and a fused matrix gives queries too.
    """
    model, facts = family
    names = [[name for name in linears(model) if fnmatchcase(name, p)] for p in facts.kv_layers_name or ()]
    _, went_out, cache = inputs_and_outputs(model, [name for found in names for name in found], model)
    for found in zip(*names, strict=True):
        held = cache.layers[names[0].index(found[0])]
        keys, values = (states.transpose(1, 2).flatten(2) for states in (held.keys, held.values))
        if len(found) == 1:
            assert went_out[found[0]].shape[-1] == model.config.hidden_size + keys.shape[-1] + values.shape[-1]
        else:
            key, value = found
            assert went_out[key].shape == keys.shape
            assert torch.equal(went_out[value], values)


def test_fused_projections_are_siblings_with_one_input(family: tuple[nn.Module, Architecture]) -> None:
    model, facts = family
    for group in facts.fused:
        paths = [next(p for p in (*facts.attention_inputs, *facts.mlp_inputs) if p.endswith(suffix)) for suffix in group]
        assert len({path.rpartition(".")[0] for path in paths}) == 1
        assert len({blocks_of(model, facts)[0].get_submodule(path).in_features for path in paths}) == 1


def test_norms_feed_exactly_the_projections_named_with_them(
    family: tuple[nn.Module, Architecture],
) -> None:
    model, facts = family
    parts = ((facts.attention_norm, facts.attention_inputs), (facts.mlp_norm, facts.mlp_inputs))
    for block in blocks_of(model, facts):
        norms = [name for name, m in block.named_modules() if "Norm" in type(m).__name__]
        came_in, went_out, _ = inputs_and_outputs(block, [*norms, *facts.attention_inputs, *facts.mlp_inputs], model)
        for named, projections in parts:
            for projection in projections:
                assert [name for name in norms if torch.equal(came_in[projection], went_out[name])] == ([] if named is None else [named])


def test_norm_has_unit_offset(family: tuple[nn.Module, Architecture]) -> None:
    model, facts = family
    block = blocks_of(model, facts)[0]
    norms = [block.get_submodule(name) for name in (facts.attention_norm, facts.mlp_norm) if name is not None]
    for norm in map(deepcopy, [*norms, model.get_submodule(facts.final_norm or "")]):
        if not list(norm.parameters()):
            assert facts.norm_has_unit_offset is False, "a norm without parameters multiplies by nothing"
            continue
        with torch.no_grad():
            for parameter in norm.parameters():
                parameter.zero_()
            silent = norm(torch.randn(1, 4, model.config.hidden_size)).abs().sum().item() == 0
        assert silent is not facts.norm_has_unit_offset
