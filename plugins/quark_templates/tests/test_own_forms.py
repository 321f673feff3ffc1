"""Mixtures with forms of their own.

Every fact on a tiny random model, with its vision tower if there is one.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import quark
from quark.config.architecture import Architecture
from quark.models.hf.shards import check_shards
from quark.models.hf.stored_tensors import StoredTensors
from quark.models.layers import counts_as
from quark.models.plan.mixtures import fused_parameters, separate_experts
from quark.torch import LLMTemplate, ModelQuantizer
from quark_templates.examples import EXPERTS
from quark_templates.plugin import OWN_FORMS

from .converted import converted
from .lacking_families import why_lacking
from .own_forms import IDS, SEEING, logits, model_of
from .test_multimodal import blocks_of, linears, matches, watched

ABSENT = {
    # As published checkpoints name them; other patterns stand for the same layers of transformers.
    "deepseek_v4": {"*wkv", "*wq_a", "*wq_b", "embed", "head", "*ffn.gate*", "hc_*", "mtp.*"},
    "gemma4": {"*multi_modal_projector*"},
    "glm5_next": {"model.language_model.layers.45.*"},  # it predicts several tokens; transformers leaves it out
    "kimi_k25": {"*mlp.gate.linear"},  # Quark wraps routers into a layer of its own
    "minimax_m3_vl": {"*patch_merge_mlp*", "*block_sparse_moe.gate"},
    "qwen4_exp": {"mtp.*"},
    "qwen4_exp_text": {"mtp.*", "model.visual.*"},
}
"""Documented patterns that match nothing in transformers' models."""
READ_BY_MORE = {"deepseek_v4", "glm5_next", "minimax_m3_vl"}
"""In some blocks of these more than the projections of attention reads the normed input, so that its norm is
not named.
"""
NORMED_BETWEEN = {"qwen4_exp", "qwen4_exp_text"}
"""Their norms lie in the connections between residual streams; none feeds projections alone, and none comes
before the head.
"""


@pytest.fixture(params=sorted(OWN_FORMS))
def model_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def facts(model_type: str) -> Architecture:
    found: Architecture = quark.templates().load_architecture(model_type)
    return found


def has_mixture(block: nn.Module, facts: Architecture) -> bool:
    return any(name == facts.experts for name, _ in block.named_modules())


def attention_of(block: nn.Module, facts: Architecture) -> set[str]:
    """Return the projections of a block's attention, or of the mixer in its place."""
    attention = {*facts.attention_inputs, *facts.attention_inner, facts.attention_output or ""}
    return attention if attention <= set(linears(block)) else set(facts.mixer)


def test_blocks_embeddings_head_and_final_norm_are_those_of_transformers(model_type: str, facts: Architecture) -> None:
    model = model_of(model_type)
    assert facts.model_type == model.config.model_type == model_type
    assert len(blocks_of(model, facts)) == model.config.get_text_config().num_hidden_layers
    assert [model.get_submodule(name) for name in facts.embeddings] == [model.get_input_embeddings()]
    assert model.get_submodule(facts.head or "") is model.get_output_embeddings()
    assert (facts.final_norm is None) is (model_type in NORMED_BETWEEN)
    last = facts.final_norm or f"{(facts.decoder_blocks or '').rpartition('.')[0]}.hyper_connection_mixer"
    came_in, went_out, _ = watched(model, [last, facts.head or ""], input_ids=IDS)
    assert torch.equal(came_in[facts.head or ""], went_out[last])


def test_every_linear_is_named_once_or_excluded(model_type: str, facts: Architecture) -> None:
    model = model_of(model_type)
    excluded = tuple(facts.with_modules(facts.exclude_layers_name))
    dense, shared = {*facts.mlp_inputs, facts.mlp_output} - {None}, set(facts.shared_experts)
    mixed = 0
    for name, block in blocks_of(model, facts).items():
        found, mixes = set(linears(block)), has_mixture(block, facts)
        known = attention_of(block, facts) | (shared if mixes else set()) | (dense if facts.experts_norm or not mixes else set())
        assert known <= found
        assert all(matches(f"{name}.{left}", excluded) for left in found - known)
        if mixes:
            mixed += 1
            assert block.get_submodule(facts.router or "").weight.shape == (EXPERTS, 32)
    assert mixed == (1 if dense and not facts.experts_norm else len(blocks_of(model, facts)))
    outside = [name for name in linears(model) if not name.startswith(f"{facts.decoder_blocks}.")]
    assert facts.head in outside
    assert all(matches(name, excluded) for name in outside)
    assert any("vision" in name or "visual" in name for name in outside) is (model_type in SEEING)


def test_every_pattern_or_its_module_pattern_matches(model_type: str, facts: Architecture) -> None:
    model = model_of(model_type)
    separate_experts(model, LLMTemplate.get(model_type).get_config("int4_wo_32"))
    names = [name for name, _ in model.named_modules()]
    queries = (facts.q_layer_name,) if isinstance(facts.q_layer_name, str) else facts.q_layer_name or ()
    patterns = {*(facts.kv_layers_name or ()), *queries, *facts.exclude_layers_name}
    assert {p for p in patterns if not any(fnmatchcase(name, p) for name in names)} == ABSENT.get(model_type, set())
    documented, own = (set(side) for side in zip(*facts.module_patterns, strict=True)) if facts.module_patterns else (set(), set())
    assert documented <= ABSENT.get(model_type, set())
    assert all(any(fnmatchcase(name, p) for name in names) for p in own)


def test_norms_feed_the_projections_named_with_them_as_one_tensor(model_type: str, facts: Architecture) -> None:
    model = model_of(model_type)
    for name, block in blocks_of(model, facts).items():
        mixes = has_mixture(block, facts)
        second = facts.shared_experts[:-1] if mixes else facts.mlp_inputs
        if facts.experts_norm:
            second = facts.mlp_inputs
        elif mixes and not second:
            second = (facts.router or "",)
        inputs_of_attention = [
            n for n in attention_of(block, facts) & {*facts.attention_inputs, *facts.mixer[:-1]} if n not in facts.mixer_context
        ]
        parts = ((facts.attention_norm, inputs_of_attention), (facts.mlp_norm, second))
        norms = [f"{name}.{n}" for n, m in block.named_modules() if "Norm" in type(m).__name__ and "NormAtt" not in type(m).__name__]
        came_in, went_out, _ = watched(model, [*norms, *(f"{name}.{p}" for _, found in parts for p in found)], input_ids=IDS)
        for named, found in parts:
            inputs = [came_in[f"{name}.{p}"] for p in found]
            assert len({x.data_ptr() for x in inputs}) == 1
            fed_by = [n for n in norms if torch.equal(went_out[n].flatten(0, -2), inputs[0].flatten(0, -2))]
            if named is None:
                assert model_type in READ_BY_MORE | NORMED_BETWEEN
                assert fed_by == ([] if model_type in NORMED_BETWEEN else [f"{name}.input_layernorm"])
            else:
                assert fed_by == [f"{name}.{named}"]


@pytest.mark.parametrize("model_type", sorted(READ_BY_MORE - {"glm5_next"}))
def test_without_a_named_attention_norm_more_layers_read_it(model_type: str, facts: Architecture) -> None:
    model = model_of(model_type)
    name, block = list(blocks_of(model, facts).items())[1]
    attention = [n for n in linears(block) if n.startswith("self_attn.") and n != facts.attention_output]
    came_in, went_out, _ = watched(model, [f"{name}.input_layernorm", *(f"{name}.{n}" for n in attention)], input_ids=IDS)
    readers = {n for n in attention if came_in[f"{name}.{n}"] is went_out[f"{name}.input_layernorm"]}
    assert readers > set(facts.attention_inputs)


@torch.no_grad()
@pytest.mark.skipif(why_lacking("glm5_next") is not None, reason=str(why_lacking("glm5_next")))
def test_the_indexer_of_glm5_next_reads_the_normed_input_by_a_matrix_that_is_no_layer() -> None:
    """Scales are powers of two: what moves them to all readers changes no bit."""
    model, facts = model_of("glm5_next"), quark.templates().load_architecture("glm5_next")
    expected, block = logits(model), list(blocks_of(model, facts).values())[1]
    scale = 2.0 ** torch.randint(-3, 4, (32,), generator=torch.Generator().manual_seed(0))
    block.get_submodule("input_layernorm").get_parameter("weight").mul_(scale)
    for name in facts.attention_inputs:
        block.get_submodule(name).get_parameter("weight").div_(scale)
    assert not torch.equal(logits(model), expected)
    block.get_submodule("self_attn.indexer").get_parameter("index_kpool_compress_gate").div_(scale)
    assert torch.equal(logits(model), expected)


def test_norm_has_unit_offset_and_norm_subtracts_mean(model_type: str, facts: Architecture) -> None:
    model = model_of(model_type)
    between = f"{facts.decoder_blocks}.0.mlp_hyper_connection.hc_norm"
    for name in (f"{facts.decoder_blocks}.0.{facts.mlp_norm}", facts.final_norm or "") if facts.final_norm else (between,):
        norm = model.get_submodule(name)
        assert isinstance(norm, nn.LayerNorm) is facts.norm_subtracts_mean
        norm.weight.data.zero_()
        assert norm(torch.arange(float(len(norm.weight)))[None]).any().item() is facts.norm_has_unit_offset


def held_values(model_type: str, model: nn.Module, facts: Architecture) -> list[tuple[Tensor, Tensor]]:
    """Return, for each block, the output of a cached projection and the cache that should equal it.

    Both are ``[tokens, features]``.
    """
    names = [n for n in linears(model) if matches(n, tuple(facts.with_modules(facts.kv_layers_name or ()))) and "indexer" not in n]
    came_in, went_out, cache = watched(model, names, input_ids=IDS[:1, :6])
    found = []
    for index, block in enumerate(blocks_of(model, facts)):
        own = [name for name in names if name.startswith(f"{block}.")]
        if not own:
            continue
        if model_type == "glm5_next":
            # The latent of all heads lies there as keys, before the factor that the pattern names.
            found.append((came_in[own[0]][0].flatten(0, -2), cache.layers[index].keys[0].flatten(0, -2)))
            continue
        output, held = went_out[own[-1]][0], cache.layers[index].values[0].transpose(0, 1)
        if model_type == "dbrx":
            output = output[:, -16:].clamp(-8, 8)
        elif model_type == "kimi_k25":
            # The latent of all heads lies there as keys, before the second factor.
            norm, latent = model.get_submodule(f"{block}.self_attn.kv_a_layernorm"), went_out[own[0]][0]
            output, held = norm(latent[:, :32]), cache.layers[index].keys[0].transpose(0, 1)
        elif model_type == "deepseek_v4":
            norm = model.get_submodule(f"{block}.self_attn.kv_norm")
            output, held = norm(output)[:1], held[:1]  # later tokens are rotated
        elif model_type == "gemma4":
            output = model.get_submodule(f"{block}.self_attn.v_norm")(output.unflatten(-1, held.shape[-2:]))
        found.append((output.flatten(1), held.flatten(1)))
    return found


def test_kv_layers_put_out_what_the_cache_holds(model_type: str, facts: Architecture) -> None:
    model = model_of(model_type)
    pairs = held_values(model_type, model, facts)
    assert len(pairs) == sum(attention_of(block, facts) != set(facts.mixer) for block in blocks_of(model, facts).values())
    for output, held in pairs:  # normalized once as the layer puts it out, once as it lies in the cache: other strides, other sums
        torch.testing.assert_close(output, held)


def test_separating_experts_keeps_the_logits_and_copies_nothing(model_type: str, facts: Architecture) -> None:
    model = model_of(model_type, torch.float64)
    before = logits(model)
    fused = list(fused_parameters(model))
    memory = {model.get_parameter(name).untyped_storage().data_ptr() for name in fused}
    names = separate_experts(model, LLMTemplate.get(model_type).get_config("int4_wo_32"))
    assert names == [f"{n}.{facts.experts}" for n, b in blocks_of(model, facts).items() if has_mixture(b, facts)]
    assert sorted({n.split(facts.experts or "")[0] for n in fused}) == [n.removesuffix(facts.experts or "") for n in names]
    assert (logits(model) - before).abs().max() < 1e-12
    layers = [p for name in names for p in model.get_submodule(name).parameters()]
    assert {p.untyped_storage().data_ptr() for p in layers} == memory
    assert len(layers) == len(names) * EXPERTS * 3
    assert list(fused_parameters(model)) == []


@pytest.mark.parametrize("fused_type", ["llama4", "llama4_text"])
def test_fused_experts_of_published_checkpoints_are_converted_to_those_of_the_model(fused_type: str, tmp_path: Path) -> None:
    model, converters = model_of(fused_type), LLMTemplate.get(fused_type).f2f_weight_converters
    model.save_pretrained(tmp_path)
    separate_experts(model, LLMTemplate.get(fused_type).get_config("int4_wo_32"))
    assert converters is not None
    made = converted(load_file(tmp_path / "model.safetensors"), converters)
    wanted = dict(model.named_parameters())
    assert {n for n in made if ".experts." in n} == {n for n in wanted if ".experts." in n}
    assert all(torch.equal(made[n], p) for n, p in wanted.items() if ".experts." in n)


@pytest.mark.parametrize("fused_type", ["dbrx", "llama4"])
def test_experts_that_stay_fused_are_reported_by_the_plan(fused_type: str) -> None:
    template = LLMTemplate.get(fused_type)
    config = template.get_config("int4_wo_32", exclude_layers=[*template.exclude_layers_name, "*experts*"])
    plan = ModelQuantizer(config).plan(model_of(fused_type))
    count = 6 if fused_type == "dbrx" else 2
    assert any(f"{count} fused matrices of experts stay float" in note for note in plan.notes)


def test_patterns_leave_the_same_layers_float_by_the_names_of_checkpoints_and_of_modules(model_type: str, tmp_path: Path) -> None:
    """transformers writes the names of published checkpoints.

    There, documented patterns alone must give the same result.
    """
    model, template = model_of(model_type), LLMTemplate.get(model_type)
    model.save_pretrained(tmp_path)
    config = template.get_config("fp8", kv_cache_scheme="fp8")
    weights = {f"{name}.weight": name for name, m in model.named_modules() if counts_as(m) is nn.Linear}
    queries = [template.q_layer_name] if isinstance(template.q_layer_name, str) else template.q_layer_name or []
    facts: Architecture = quark.templates().load_architecture(model_type)
    compared = 0
    for recipe in StoredTensors(model, check_shards(tmp_path), tmp_path).recipes:
        for module in (weights[target] for target in recipe.targets if target in weights):
            compared += 1
            for _, stored in recipe.sources:
                published = stored.removesuffix(".weight")
                assert matches(module, tuple(config.exclude)) == matches(published, tuple(template.exclude_layers_name)), published
                if module.startswith(f"{facts.decoder_blocks}.") and "indexer" not in module and "compressor" not in module:
                    cached = matches(published, tuple(template.kv_layers_name or ()))
                    assert matches(module, tuple(config.kv_cache_quant_config)) == cached, published
                    assert matches(module, tuple(facts.with_modules(queries))) == matches(published, tuple(queries)), published
    assert compared == len(weights)
