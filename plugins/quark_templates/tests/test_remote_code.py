"""Families whose code comes with checkpoints.

Every fact on a skeleton of the published names and wiring, then the whole way round.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from copy import deepcopy
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import quark
from quark.config.architecture import Architecture
from quark.models.layers import QuantizedLayer
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark_templates.plugin import REMOTE_CODE

from .caches import eight_bit_cache
from .skeletons import SKELETONS
from .skeletons.parts import Attending, Skeleton

IDS = torch.arange(3, 63).reshape(3, 20)
RETIRED = {"*.gate.linear"}
"""Documented patterns for wrappers of routers that older releases put in."""


@pytest.fixture(params=sorted(REMOTE_CODE))
def family(request: pytest.FixtureRequest) -> tuple[Skeleton, Architecture]:
    return skeleton(request.param), quark.templates().load_architecture(request.param)


@cache
def skeleton(model_type: str) -> Skeleton:
    """The same object each time; tests that change it take a copy."""
    return SKELETONS[model_type]()


def blocks_of(model: nn.Module, facts: Architecture) -> list[nn.Module]:
    return list(model.get_submodule(facts.decoder_blocks or "").children())


def linears(module: nn.Module) -> list[str]:
    return [name for name, m in module.named_modules() if isinstance(m, nn.Linear)]


def excluded(name: str, facts: Architecture) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in facts.exclude_layers_name)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS).logits
    return found


def watched(model: nn.Module, modules: Iterable[nn.Module]) -> tuple[dict[nn.Module, Tensor], dict[nn.Module, Tensor]]:
    """Return inputs and outputs of modules in one forward pass: the tensors themselves, not copies."""
    came_in: dict[nn.Module, Tensor] = {}
    went_out: dict[nn.Module, Tensor] = {}

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        came_in[module], went_out[module] = args[0], output

    handles = [module.register_forward_hook(hook) for module in modules]
    logits(model)
    for handle in handles:
        handle.remove()
    return came_in, went_out


def test_every_family_with_remote_code_has_a_skeleton() -> None:
    assert set(SKELETONS) == set(REMOTE_CODE)


def test_the_skeleton_is_of_the_family(family: tuple[Skeleton, Architecture]) -> None:
    model, facts = family
    assert facts.model_type == model.config.model_type


def test_embeddings_head_and_final_norm_are_those_of_the_skeleton(family: tuple[Skeleton, Architecture]) -> None:
    model, facts = family
    assert [model.get_submodule(name) for name in facts.embeddings] == [model.get_input_embeddings()]
    head, norm = (model.get_submodule(name or "") for name in (facts.head, facts.final_norm))
    assert head is model.get_output_embeddings()
    came_in, went_out = watched(model, [head, norm])
    assert came_in[head] is went_out[norm]


def test_every_linear_of_a_block_is_named_once_or_is_an_expert_or_router(family: tuple[Skeleton, Architecture]) -> None:
    model, facts = family
    attention = [*facts.attention_inputs, *facts.attention_inner, facts.attention_output or ""]
    dense = [*facts.mlp_inputs, *([facts.mlp_output] if facts.mlp_output else [])]
    sparse = 0
    for block in blocks_of(model, facts):
        mixes = facts.experts is not None and facts.experts in dict(block.named_modules())
        sparse += mixes
        of_experts = [name for name in linears(block) if mixes and name.startswith(f"{facts.experts}.")]
        mixing = attention if set(attention) <= set(linears(block)) else facts.mixer
        named = [*mixing, *(facts.shared_experts if mixes else dense)]
        left = set(linears(block)) - set(of_experts) - {facts.router}
        assert sorted(left - {name for name in left if excluded(f"x.{name}", facts) and name not in named}) == sorted(named)
        if mixes:
            assert {name.split(".")[-1] for name in of_experts} == {*facts.expert_inputs, facts.expert_output}
            assert block.get_submodule(facts.router or "").weight.shape == (len(block.get_submodule(facts.experts or "")), 32)
    assert sparse == (0 if facts.experts is None else 1 if dense else 2)


def test_layers_outside_the_blocks_and_routers_stay_float(family: tuple[Skeleton, Architecture]) -> None:
    model, facts = family
    apart = [name for name in linears(model) if not name.startswith(f"{facts.decoder_blocks}.")]
    routers = [name for name in linears(model) if facts.router and name.endswith(f".{facts.router}")]
    assert facts.head in apart
    assert all(excluded(name, facts) for name in apart + routers)


def test_every_pattern_matches_a_layer_or_a_module(family: tuple[Skeleton, Architecture]) -> None:
    model, facts = family
    queries = (facts.q_layer_name,) if isinstance(facts.q_layer_name, str) else facts.q_layer_name or ()
    inside = (*facts.attention_inputs, *facts.attention_inner, *facts.mixer)
    for pattern in (*(facts.kv_layers_name or ()), *queries):
        assert any(name.endswith(inside) for name in linears(model) if fnmatchcase(name, pattern))
    names = [name for name, _ in model.named_modules()]
    unmatched = {pattern for pattern in facts.exclude_layers_name if not any(fnmatchcase(name, pattern) for name in names)}
    assert unmatched == RETIRED & set(facts.exclude_layers_name)


def test_norms_feed_the_projections_named_with_them_as_one_tensor(family: tuple[Skeleton, Architecture]) -> None:
    model, facts = family
    mlp = (*facts.mlp_inputs, facts.router, *facts.shared_experts[:2])
    for block in blocks_of(model, facts):
        known = dict(block.named_modules())
        norms = [m for m in known.values() if isinstance(m, nn.RMSNorm)]
        first = [name for name in facts.mixer[:-1] if name not in facts.mixer_context] if facts.attention_inputs[0] not in known else ()
        for norm, names in ((facts.attention_norm, first or facts.attention_inputs), (facts.mlp_norm, mlp)):
            if norm is None:
                assert facts.model_type == "kimi_k3", "in its mixtures the norm feeds a projection in front of the experts"
                continue
            fed = [known[name] for name in names if name in known]
            came_in, went_out = watched(model, [*norms, *fed])
            assert fed
            assert all(came_in[module] is went_out[known[norm or ""]] for module in fed)


def test_kv_layers_put_out_what_enters_the_cache(family: tuple[Skeleton, Architecture]) -> None:
    """Values are the output of a projection or a part of it.

    Only the named layers and norms come before keys and values.
    """
    model, facts = family
    for block in blocks_of(model, facts):
        attention = next((m for m in block.modules() if isinstance(m, Attending)), None)
        if attention is None:  # a state instead of a cache
            assert facts.mixer
            continue
        sources = [m for name, m in block.named_modules() if any(fnmatchcase(f"x.{name}", p) for p in facts.kv_layers_name or ())]
        _, went_out = watched(model, sources)
        before = deepcopy(attention.entered)
        hooks = [m.register_forward_hook(lambda *args: torch.zeros_like(args[2])) for m in sources]
        logits(model)
        for hook in hooks:
            hook.remove()
        assert all(states.count_nonzero() == 0 for states in attention.entered)
        assert all(states.count_nonzero() > 0 for states in before)
        values = before[1].flatten()
        behind = facts.model_type == "kimi_k3"  # its patterns name the first factor alone
        assert any(torch.isin(values, output).all() for output in went_out.values()) is not behind


def test_fused_projections_are_siblings_with_one_input(family: tuple[Skeleton, Architecture]) -> None:
    model, facts = family
    for first, *others in facts.fused:
        found = [name for name in linears(model) if name.endswith(f".{first}") and not name.startswith(("model.vision", "model.sam"))]
        assert found
        for name in found:
            siblings = [f"{name.rpartition('.')[0]}.{other}" for other in others]
            came_in, _ = watched(model, map(model.get_submodule, [name, *siblings]))
            assert len({tensor.shape for tensor in came_in.values()}) == 1
            assert all(torch.equal(tensor, came_in[model.get_submodule(name)]) for tensor in came_in.values())


def test_norms_have_no_unit_offset(family: tuple[Skeleton, Architecture]) -> None:
    model, facts = family
    assert facts.norm_has_unit_offset is False
    assert all(m.weight is not None for m in model.modules() if isinstance(m, nn.RMSNorm))


@pytest.mark.parametrize("scheme", ["int4_wo_32", "fp8", "mxfp4"])
def test_a_quantized_model_is_read_back_with_the_same_logits(family: tuple[Skeleton, Architecture], scheme: str, tmp_path: Path) -> None:
    float_model, facts = family
    # Keys of Instella pass a norm, and its code calls no attention that can be exchanged: what it caches is
    # out of reach, and refused.
    cache = eight_bit_cache(facts.model_type) | ({"kv_cache_post_rope": False} if facts.model_type == "instella" else {})
    config = LLMTemplate.get(facts.model_type).get_config(scheme, **cache)
    model = ModelQuantizer(config).quantize_model(deepcopy(float_model), list(IDS.split(1)))
    export_safetensors(model, tmp_path / "out")
    expected = logits(model)
    assert expected.isfinite().all()
    assert not torch.equal(expected, logits(float_model)), "nothing was quantized"
    fresh = SKELETONS[facts.model_type]()
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    assert torch.equal(logits(import_model_from_safetensors(fresh, tmp_path / "out")), expected)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as tensors:
        names = set(tensors.keys())
    scaled = {name.removesuffix(".weight_scale") for name in names if name.endswith(".weight_scale")}
    assert scaled == {name for name in linears(float_model) if not excluded(name, facts)}
    inside = [name for name in linears(float_model) if name.startswith(f"{facts.decoder_blocks}.")]
    cached = {name for name in inside if any(fnmatchcase(name, p) for p in facts.kv_layers_name or ())}
    assert {name.removesuffix(".output_scale") for name in names if name.endswith(".output_scale")} == cached


def test_only_the_routed_experts_of_kimi_k2_are_quantized() -> None:
    plan = ModelQuantizer(LLMTemplate.get("kimi_k2").get_config("mxfp4")).plan(skeleton("kimi_k2"))
    assert {".".join(row.name.split(".")[3:5]) for row in plan.quantized} == {"mlp.experts"}
    assert len(plan.quantized) == 4 * 3


def kimi_on_deepseek_v3() -> nn.Module:
    """transformers' DeepSeek-V3 under Kimi-K2's name, as its remote code derives from it."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "max_position_embeddings": 64}
    dims = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2}
    routing = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "pad_token_id": 0}
    base = type(AutoConfig.for_model("deepseek_v3"))
    config = base(**sizes, **heads, **dims, **routing)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.config = type("KimiK2Config", (base,), {"model_type": "kimi_k2"})(**sizes, **heads, **dims, **routing)
    model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize("scheme", ["int4_wo_32", "mxfp4"])
def test_kimi_k2_on_the_modules_of_deepseek_v3_is_quantized_expert_by_expert_and_read_back(scheme: str, tmp_path: Path) -> None:
    config = LLMTemplate.get("kimi_k2").get_config(scheme, kv_cache_scheme="fp8", kv_cache_post_rope=False)
    model = ModelQuantizer(config).quantize_model(kimi_on_deepseek_v3(), list(IDS.split(1)))
    weighted = {name for name, m in model.named_modules() if isinstance(m, QuantizedLayer) and m.weight_quantizer is not None}
    assert weighted == {f"model.layers.1.mlp.experts.{i}.{p}_proj" for i in range(4) for p in ("gate", "up", "down")}
    export_safetensors(model, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))["model_type"] == "kimi_k2"
    assert torch.equal(logits(import_model_from_safetensors(kimi_on_deepseek_v3(), tmp_path / "out")), logits(model))


def test_the_head_stays_float(family: tuple[Skeleton, Architecture]) -> None:
    _, facts = family
    assert facts.head is not None
    assert excluded(facts.head, facts)
