"""Every fact of every family, checked on a tiny randomly initialised model of that type from transformers."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import quark
from quark.specs.architecture import Architecture
from quark_templates.plugin import FAMILIES

DOCUMENTED = json.loads((Path(__file__).parent / "documented_templates.json").read_text(encoding="utf-8"))
HEADS, KV_HEADS, HIDDEN, MLP, LAYERS = 4, 2, 32, 48, 2


@cache
def tiny_model(model_type: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    names = {
        "vocab_size": 64,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    names |= (
        {"ffn_dim": MLP, "word_embed_proj_dim": HIDDEN}
        if model_type == "opt"
        else {"intermediate_size": MLP, "num_key_value_heads": KV_HEADS, "head_dim": HIDDEN // HEADS}
    )
    if model_type == "phi3":
        del names["head_dim"]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **names), dtype=torch.float32).eval()


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> tuple[nn.Module, Architecture]:
    return tiny_model(request.param), quark.templates().load(request.param, "architecture")


def blocks_of(model: nn.Module, facts: Architecture) -> nn.ModuleList:
    blocks = model.get_submodule(facts.decoder_blocks or "")
    assert isinstance(blocks, nn.ModuleList)
    return blocks


def linears(module: nn.Module) -> dict[str, nn.Linear]:
    return {name: m for name, m in module.named_modules() if isinstance(m, nn.Linear)}


def test_each_family_is_listed_as_a_template() -> None:
    assert set(FAMILIES) <= set(quark.templates().names())


def test_the_name_of_a_family_is_its_model_type(family: tuple[nn.Module, Architecture]) -> None:
    model, facts = family
    assert facts.model_type == model.config.model_type
    assert quark.templates().get(facts.model_type).name == facts.model_type


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_documented_fields_are_as_documented(model_type: str) -> None:
    from quark.templates import LLMTemplate

    template, documented = LLMTemplate.get(model_type), DOCUMENTED[model_type]
    assert template.kv_layers_name == documented["kv_layers"]
    assert [template.q_layer_name] == documented["q_layers"]
    assert template.exclude_layers_name == documented["exclude"]
    assert template.gate_up_layers_name == documented["gate_up"]


def test_the_blocks_are_all_there(family: tuple[nn.Module, Architecture]) -> None:
    assert len(blocks_of(*family)) == LAYERS


def test_embeddings_head_and_final_norm_are_what_they_are_called(family: tuple[nn.Module, Architecture]) -> None:
    model, facts = family
    assert [model.get_submodule(name) for name in facts.embeddings] == [model.get_input_embeddings()]
    assert model.get_submodule(facts.head or "") is model.get_output_embeddings()
    assert model.get_submodule(facts.final_norm or "").weight.shape == (HIDDEN,)


def test_every_linear_of_a_block_has_exactly_one_place(family: tuple[nn.Module, Architecture]) -> None:
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
        assert len(found) == LAYERS
        assert all(name.endswith(facts.attention_inputs) for name in found)


def test_outputs_that_enter_the_cache_have_the_width_of_the_key_value_heads(family: tuple[nn.Module, Architecture]) -> None:
    model, facts = family
    width = HIDDEN // HEADS * (HEADS if facts.model_type == "opt" else KV_HEADS)
    fused = HIDDEN + 2 * width
    for name, linear in linears(model).items():
        if any(fnmatchcase(name, p) for p in facts.kv_layers_name or ()):
            assert linear.out_features == (fused if len(facts.attention_inputs) == 1 else width)


def test_fused_projections_are_siblings_with_one_input(family: tuple[nn.Module, Architecture]) -> None:
    model, facts = family
    for group in facts.fused:
        paths = [next(p for p in (*facts.attention_inputs, *facts.mlp_inputs) if p.endswith(suffix)) for suffix in group]
        assert len({path.rpartition(".")[0] for path in paths}) == 1
        assert len({blocks_of(model, facts)[0].get_submodule(path).in_features for path in paths}) == 1


def inputs_and_outputs(block: nn.Module, names: list[str], model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What went into and came out of some modules of a block in one forward pass."""
    came_in: dict[str, torch.Tensor] = {}
    went_out: dict[str, torch.Tensor] = {}

    def watch(name: str) -> None:
        def hook(_: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            came_in[name], went_out[name] = args[0], output

        handles.append(block.get_submodule(name).register_forward_hook(hook))

    handles: list[torch.utils.hooks.RemovableHandle] = []
    for name in names:
        watch(name)
    with torch.no_grad():
        model(torch.arange(3, 11).unsqueeze(0))
    for handle in handles:
        handle.remove()
    return came_in, went_out


def test_each_norm_feeds_the_projections_it_is_said_to_feed(family: tuple[nn.Module, Architecture]) -> None:
    model, facts = family
    norms = {facts.attention_norm or "": facts.attention_inputs, facts.mlp_norm or "": facts.mlp_inputs}
    names = [*norms, *facts.attention_inputs, *facts.mlp_inputs]
    for block in blocks_of(model, facts):
        came_in, went_out = inputs_and_outputs(block, names, model)
        for norm, projections in norms.items():
            for projection in projections:
                assert torch.equal(came_in[projection], went_out[norm])


def test_norms_have_a_unit_offset_exactly_where_it_is_said(family: tuple[nn.Module, Architecture]) -> None:
    model, facts = family
    block = blocks_of(model, facts)[0]
    norm = block.get_submodule(facts.attention_norm or "")
    bare = norm.weight.detach().clone()
    try:
        with torch.no_grad():
            norm.weight.zero_()
        silent = norm(torch.randn(1, 4, HIDDEN)).abs().sum().item() == 0
    finally:
        with torch.no_grad():
            norm.weight.copy_(bare)
    assert silent is not facts.norm_has_unit_offset
