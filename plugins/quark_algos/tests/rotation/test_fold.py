"""A model with rotations folded in computes the same function.

Each part of the folding counts, and what cannot be rotated is refused.
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from quark.config.architecture import Architecture
from quark.errors import ConfigError, UnsupportedError
from quark.models.layers.experts import SeparateExperts
from quark.torch import LLMTemplate, ModelQuantizer
from quark_algos.rotation.fold import fold_r1, fold_r2, r1_of, untie
from quark_algos.rotation.hadamard import Rotation
from quark_algos.rotation.residual_stream import check, in_block, outside_blocks

from .models import HEADS, WIDTH, blocks_of, distance, facts_of, logits, model_of

TOLERANCE = 1e-9
FAMILIES = ["gemma", "gpt2", "gpt_neox", "llama", "mixtral", "opt", "phi", "phi3", "qwen3", "qwen3_moe", "stablelm"]
TIED_OR_NOT: list[tuple[str, dict[str, Any]]] = [("llama", {"tie_word_embeddings": True}), ("qwen3", {"tie_word_embeddings": True})]
CASES = [*((name, {}) for name in FAMILIES), *TIED_OR_NOT]


def rotate(model: nn.Module, facts: Architecture, rotation: Rotation) -> None:
    fold_r1(outside_blocks(model, facts), facts, rotation)
    untie(model)
    for module in blocks_of(model, facts):
        fold_r1(in_block(module, facts), facts, rotation)


@pytest.mark.parametrize(("size", "seed"), [(None, None), (None, 4), (16, 4)])
@pytest.mark.parametrize(("model_type", "sizes"), CASES)
def test_the_rotated_model_computes_what_it_did(model_type: str, sizes: dict[str, Any], size: int | None, seed: int | None) -> None:
    facts, model = facts_of(model_type), model_of(model_type, **sizes)
    before, embedded = logits(model), model.get_submodule(facts.embeddings[0]).get_parameter("weight")
    rotate(model, facts, r1_of(WIDTH, facts, size, seed))
    assert distance(model.get_submodule(facts.embeddings[0]).get_parameter("weight"), embedded) > 0.1
    assert distance(logits(model), before) < TOLERANCE


def test_a_wider_model_rotates_in_blocks_of_32() -> None:
    facts = facts_of("llama")
    model = model_of("llama", hidden_size=96)
    before = logits(model)
    rotation = r1_of(96, facts, 32)
    assert rotation.block == 32
    rotate(model, facts, rotation)
    assert distance(logits(model), before) < TOLERANCE


@pytest.mark.parametrize("seed", [None, 4])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_values_rotate_by_head(model_type: str, seed: int | None) -> None:
    facts, model = facts_of(model_type), model_of(model_type)
    before = logits(model)
    for module in blocks_of(model, facts):
        columns = module.get_submodule(facts.attention_output or "").get_parameter("weight")
        assert fold_r2(module, facts, HEADS, seed) is None
        assert distance(module.get_submodule(facts.attention_output or "").get_parameter("weight"), columns) > 0.1
    assert distance(logits(model), before) < TOLERANCE


@pytest.mark.parametrize("model_type", ["llama", "gemma", "mixtral", "opt"])
def test_every_module_that_touches_the_stream_counts(model_type: str) -> None:
    facts, model = facts_of(model_type), model_of(model_type)
    before, state = logits(model), {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}
    rotate(model, facts, r1_of(WIDTH, facts, seed=1))
    streams = [outside_blocks(model, facts), *(in_block(module, facts) for module in blocks_of(model, facts))]
    touched = {m for s in streams for m in (*s.writers.values(), *(m for r in s.readings for m in r.readers.values()))}
    names = [name for name, module in model.named_modules() if module in touched]
    assert len(names) == len(touched)
    for name in names:
        module = model.get_submodule(name)
        rotated = module.get_parameter("weight")
        module.weight = nn.Parameter(state[f"{name}.weight"])
        assert distance(logits(model), before) > 1e-6, name
        module.weight = rotated
    assert distance(logits(model), before) < TOLERANCE


def test_parameters_are_made_anew_and_the_head_is_untied() -> None:
    facts, model = facts_of("gemma"), model_of("gemma", tie_word_embeddings=True)
    old = {name: (p, p.detach().clone()) for name, p in model.named_parameters(remove_duplicate=False)}
    assert old["lm_head.weight"][0] is old["model.embed_tokens.weight"][0]
    rotate(model, facts, r1_of(WIDTH, facts))
    assert all(torch.equal(parameter, copy) for parameter, copy in old.values())
    new = dict(model.named_parameters(remove_duplicate=False))
    assert new["lm_head.weight"] is not new["model.embed_tokens.weight"]
    assert model.config.tie_word_embeddings is False


@pytest.mark.parametrize(("outer", "inner"), [(True, True), (True, False), (False, True), (False, False)])
def test_untying_holds_for_a_model_of_several_parts_and_for_its_text_part(outer: bool, inner: bool) -> None:
    """transformers ties by the outer configuration, and runtimes read the one of the text."""
    config = AutoConfig.for_model("gemma3", tie_word_embeddings=outer)
    config.get_text_config().tie_word_embeddings = inner
    model = nn.Module()
    model.config = config
    untie(model)
    assert (config.tie_word_embeddings, config.get_text_config().tie_word_embeddings) == (False, False)


def test_weights_of_16_bits_are_rounded_once() -> None:
    facts = facts_of("llama")
    fine, coarse = model_of("llama", torch.bfloat16).double(), model_of("llama", torch.bfloat16)
    rotation = r1_of(WIDTH, facts, seed=2)
    rotate(fine, facts, rotation)
    rotate(coarse, facts, rotation)
    exact = dict(fine.named_parameters())
    for name, parameter in coarse.named_parameters():
        assert parameter.dtype is torch.bfloat16
        error = (parameter.double() - exact[name]).abs()
        assert bool((error <= exact[name].abs() * 2**-8 * 1.001 + 1e-6).all()), name


def test_a_bias_that_no_reader_takes_stays_with_its_norm_unless_its_weight_is_zero() -> None:
    facts, model = facts_of("opt"), model_of("opt")
    final = model.get_submodule(facts.final_norm or "")
    before, bias = logits(model), final.get_parameter("bias")
    rotate(model, facts, r1_of(WIDTH, facts))
    assert distance(final.get_parameter("bias"), bias) > 0.1
    assert distance(logits(model), before) < TOLERANCE
    other = model_of("opt")
    other.get_submodule(facts.final_norm or "").get_parameter("weight").data[3] = 0
    kept = dict(other.named_parameters())
    with pytest.raises(UnsupportedError, match="weight 0"):
        fold_r1(outside_blocks(other, facts), facts, r1_of(WIDTH, facts))
    assert all(p is kept[name] for name, p in other.named_parameters())


@pytest.mark.parametrize(
    ("model_type", "variant", "said"),
    [
        ("opt", {"do_layer_norm_before": False}, "final_layer_norm"),
        ("stablelm", {"use_parallel_residual": True}, "but not post_attention_layernorm"),
    ],
)
def test_variants_that_lack_a_norm_are_refused(model_type: str, variant: dict[str, Any], said: str) -> None:
    facts, model = facts_of(model_type), model_of(model_type, **variant)
    with pytest.raises(UnsupportedError, match=said):
        rotate(model, facts, r1_of(WIDTH, facts))


@pytest.mark.parametrize("model_type", ["gemma2", "bloom", "olmo2"])
def test_families_that_cannot_be_rotated_say_why(model_type: str) -> None:
    with pytest.raises(UnsupportedError, match=r"scales? single channels"):
        check(facts_of(model_type))
    unknown = Architecture(model_type="plain", unsupported={"rotation": "it has two streams"})
    with pytest.raises(UnsupportedError, match="two streams"):
        in_block(nn.Module(), unknown)


def test_what_does_not_fit_is_refused_before_anything_changes() -> None:
    opt, llama = facts_of("opt"), facts_of("llama")
    model, other = model_of("opt"), model_of("llama")
    kept = {**dict(model.named_parameters()), **dict(other.named_parameters())}
    with pytest.raises(ConfigError, match="does not preserve it"):
        fold_r1(outside_blocks(model, opt), opt, Rotation.of(WIDTH))
    with pytest.raises(ConfigError, match="has 32 channels"):
        fold_r1(in_block(blocks_of(other, llama)[0], llama), llama, Rotation.of(64))
    without = attrs.evolve(llama, attention_value=None)
    assert "no value projection" in (fold_r2(blocks_of(other, llama)[0], without, HEADS) or "")
    now = {**dict(model.named_parameters()), **dict(other.named_parameters())}
    assert all(parameter is kept[name] for name, parameter in now.items())


def test_fused_experts_are_refused() -> None:
    facts, model = facts_of("mixtral"), model_of("mixtral")
    module = blocks_of(model, facts)[0]
    experts = nn.Module()
    experts.down_proj = nn.Parameter(torch.zeros(3, WIDTH, 64))
    module.set_submodule(facts.experts or "", experts)
    with pytest.raises(UnsupportedError, match="in a form that cannot be split"):
        in_block(module, facts)


def test_fused_experts_are_taken_apart_by_the_run_also_where_they_stay_float() -> None:
    template = LLMTemplate.get("qwen3_moe")
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 64,
        "head_dim": 16,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    }
    family = AutoConfig.for_model("qwen3_moe", **sizes, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4)
    options = {"scheme": "int4_wo_32", "algorithm": "rotation"}
    excluding = template.get_config(**options, exclude_layers=["lm_head", "*.gate", "*experts*"])
    data = [torch.arange(16)[None]]
    apart = []
    for config in (excluding, template.get_config(**options), attrs.evolve(excluding, algo_config=None)):
        model = ModelQuantizer(config).quantize_model(AutoModelForCausalLM.from_config(family).eval(), data)
        apart.append(any(isinstance(module, SeparateExperts) for module in model.modules()))
    assert apart == [True, True, False]


def test_values_that_gates_multiply_are_left_alone() -> None:
    facts, model = facts_of("llama"), model_of("llama")
    module = blocks_of(model, facts)[0]
    module.set_submodule("self_attn.q_proj", nn.Linear(WIDTH, 2 * WIDTH))
    kept = dict(module.named_parameters())
    assert "gates" in (fold_r2(module, facts, HEADS) or "")
    assert all(p is kept[name] for name, p in module.named_parameters())
