"""Families that see, and their text parts.

Every fact of the language part on a tiny random model with its vision tower.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quark
from quark.base.version import transformers_version
from quark.config.architecture import Architecture
from quark.models.layers import counts_as
from quark.models.plan.mixtures import separate_experts
from quark.torch import LLMTemplate
from quark_templates.examples import EXPERTS
from quark_templates.plugin import MULTIMODAL, TEXT_PARTS

from .converted import converted
from .seeing_models import IDS, image_batch, model_of

ABSENT = {
    "gemma4_unified": {"*vision_embedder*"},  # its name in published checkpoints; the module is embed_vision
    "mllama": {"multi_modal_projector"},  # the name in published checkpoints; the module lies under "model."
    "qwen3_5": {"*mtp*"},  # transformers leaves out the layers that predict several tokens
    "qwen3_5_text": {"*mtp*"},
    "qwen3_5_moe": {"mtp.*", "*mlp.gate.linear"},  # Quark wraps routers into a layer of its own
    "qwen3_5_moe_text": {"mtp.*", "*mlp.gate.linear"},
    "qwen3_vl_moe": {"*mlp.gate.linear"},
}
"""Patterns that match nothing in transformers' models."""
OWN_FINAL_NORM = {"muse_glimmer"}
"""Their final norm multiplies by its weight, though those of blocks multiply by 1 + weight."""


def linears(module: nn.Module) -> dict[str, nn.Module]:
    return {name: m for name, m in module.named_modules() if counts_as(m) is nn.Linear}


def blocks_of(model: nn.Module, facts: Architecture) -> dict[str, nn.Module]:
    return {f"{facts.decoder_blocks}.{name}": block for name, block in model.get_submodule(facts.decoder_blocks or "").named_children()}


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, p) for p in patterns)


def watched(model: nn.Module, names: list[str], **batch: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    """Return inputs and outputs of some modules in one forward pass, and the KV cache."""
    came_in: dict[str, Tensor] = {}
    went_out: dict[str, Tensor] = {}

    def watch(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            came_in[name], went_out[name] = args[0], output

        return model.get_submodule(name).register_forward_hook(hook)

    handles = [watch(name) for name in names]
    with torch.no_grad():
        cache = model(**batch, use_cache=True).past_key_values
    for handle in handles:
        handle.remove()
    return came_in, went_out, cache


def batch_of(model_type: str) -> dict[str, Tensor]:
    """Batches that pass every block: text, but for blocks that attend to an image."""
    return image_batch(model_type) if model_type == "mllama" else {"input_ids": IDS}


@pytest.fixture(params=sorted(MULTIMODAL | TEXT_PARTS))
def model_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def facts(model_type: str) -> Architecture:
    found: Architecture = quark.templates().load_architecture(model_type)
    return found


def test_blocks_embeddings_head_and_final_norm_are_those_of_transformers(model_type: str, facts: Architecture) -> None:
    model = model_of(model_type)
    assert facts.model_type == model.config.model_type == model_type
    assert len(blocks_of(model, facts)) == model.config.get_text_config().num_hidden_layers
    assert [model.get_submodule(name) for name in facts.embeddings] == [model.get_input_embeddings()]
    assert model.get_submodule(facts.head or "") is model.get_output_embeddings()
    came_in, went_out, _ = watched(model, [facts.final_norm or "", facts.head or ""], input_ids=IDS)
    assert torch.equal(came_in[facts.head or ""], went_out[facts.final_norm or ""])


def test_every_linear_of_a_block_is_named_once_or_excluded(model_type: str, facts: Architecture) -> None:
    model = model_of(model_type)
    attention = {*facts.attention_inputs, facts.attention_output or ""}
    mlp = {*facts.mlp_inputs, facts.mlp_output or "", *facts.shared_experts} - {""}
    kinds = set()
    for name, block in blocks_of(model, facts).items():
        found, attends = set(linears(block)), facts.attention_output in linears(block)
        kinds.add(attends)
        known = (attention if attends else set(facts.mixer)) | mlp
        assert known <= found
        assert all(matches(f"{name}.{left}", facts.exclude_layers_name) for left in found - known)
        assert (facts.experts is not None) == any(n == facts.experts for n, _ in block.named_modules())
        if facts.experts is not None:
            assert block.get_submodule(facts.router or "").weight.shape == (EXPERTS, 32)
    assert kinds == ({True, False} if facts.mixer else {True})


def test_every_linear_outside_the_blocks_is_excluded_except_in_mllama(model_type: str, facts: Architecture) -> None:
    outside = [name for name in linears(model_of(model_type)) if not name.startswith(f"{facts.decoder_blocks}.")]
    left = {name.partition(".layers.")[0] for name in outside if not matches(name, facts.exclude_layers_name)}
    seeing = {"model.vision_model.transformer", "model.vision_model.global_transformer", "model.multi_modal_projector"}
    assert left == (seeing if model_type == "mllama" else set())


def test_every_pattern_matches_what_transformers_has(model_type: str, facts: Architecture) -> None:
    names = [name for name, _ in model_of(model_type).named_modules()]
    patterns = {*(facts.kv_layers_name or ()), str(facts.q_layer_name), *facts.exclude_layers_name}
    assert {p for p in patterns if not any(fnmatchcase(name, p) for name in names)} == ABSENT.get(model_type, set())


def test_norms_feed_the_projections_named_with_them_as_one_tensor(model_type: str, facts: Architecture) -> None:
    model = model_of(model_type)
    crossing = [p for p in facts.mixer if p.startswith("cross_attn.")]
    mixing = [p for p in facts.mixer if not p.endswith("out_proj")] if not crossing else crossing[:1]
    mlp = [*facts.mlp_inputs, *facts.shared_experts[:2]]
    for name, block in blocks_of(model, facts).items():
        first = list(facts.attention_inputs) if facts.attention_output in linears(block) else mixing
        parts = ((facts.attention_norm, first), (facts.mlp_norm, mlp))
        norms = [f"{name}.{n}" for n, m in block.named_modules() if type(m).__name__.endswith("Norm")]
        projections = [f"{name}.{p}" for _, found in parts for p in found]
        came_in, went_out, _ = watched(model, norms + projections, **batch_of(model_type))
        for named, found in parts:
            inputs = [came_in[f"{name}.{p}"].flatten(0, -2) for p in found]
            assert len({x.data_ptr() for x in inputs}) <= 1
            fed_by = [n for n in norms if inputs and torch.equal(went_out[n].flatten(0, -2), inputs[0])]
            assert fed_by == ([f"{name}.{named}"] if inputs else [])


def test_norm_has_unit_offset(model_type: str, facts: Architecture) -> None:
    model = model_of(model_type)
    names = [f"{facts.decoder_blocks}.0.{facts.attention_norm}", f"{facts.decoder_blocks}.0.{facts.mlp_norm}", facts.final_norm or ""]
    for name in names:
        norm = model.get_submodule(name)
        norm.weight.data.zero_()
        other = name == facts.final_norm and model_type in OWN_FINAL_NORM
        assert norm(torch.ones(1, 32)).any().item() is (facts.norm_has_unit_offset is not other)


def test_kv_layers_put_out_what_the_cache_holds(model_type: str, facts: Architecture) -> None:
    """Values are held as the projection put them out; keys are normed or rotated on the way."""
    model = model_of(model_type)
    keys, values = ([name for name in linears(model) if fnmatchcase(name, p)] for p in facts.kv_layers_name or ())
    blocks = list(blocks_of(model, facts))
    attending = [i for i, name in enumerate(blocks) if any(key.startswith(f"{name}.") for key in keys)]
    assert len(keys) == len(values) == len(attending)
    assert len(attending) == sum("linear_attn.out_proj" not in linears(model.get_submodule(name)) for name in blocks)
    _, went_out, cache = watched(model, keys + values, **batch_of(model_type))
    if not hasattr(cache, "layers"):
        pytest.skip(f"transformers {transformers_version()} caches keys in a class of that family")
    for i, key, value in zip(attending, keys, values, strict=True):
        held = cache.layers[i]
        assert key.rpartition(".")[0] == value.rpartition(".")[0]
        assert went_out[key].numel() == held.keys.numel()
        put_out = went_out[value].unflatten(-1, (-1, held.values.shape[-1]))
        if facts.attention_value is None:  # a norm of each head lies behind the projection
            put_out = model.get_submodule(value.replace("v_proj", "v_norm"))(put_out)
        assert torch.equal(put_out, held.values.transpose(1, 2))


@pytest.mark.parametrize(("mixed_type", "transposed"), [("qwen3_5_moe", False), ("qwen3_vl_moe", True)])
def test_fused_experts_of_published_checkpoints_are_converted_to_those_of_the_model(mixed_type: str, transposed: bool) -> None:
    """Published checkpoints store Qwen3-VL's as ``[experts, in, out]``, see vLLM's loader.

    Qwen3.5's are stored as the model has them.
    """
    model, converters = model_of(mixed_type), LLMTemplate.get(mixed_type).f2f_weight_converters
    name = "model.language_model.layers.0.mlp.experts"
    stored = {n: p.transpose(1, 2) if transposed else p for n, p in model.named_parameters() if n.startswith(name)}
    assert sorted(p.ndim for p in stored.values()) == [3, 3]
    separate_experts(model, LLMTemplate.get(mixed_type).get_config("int4_wo_32"))
    assert converters is not None
    made = converted(stored, converters)
    wanted = {n: p for n, p in model.named_parameters() if n.startswith(f"{name}.")}
    assert made.keys() == wanted.keys()
    assert all(torch.equal(made[n], p) for n, p in wanted.items())
