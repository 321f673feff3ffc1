"""Families of mixtures.

Every fact on a tiny random model, experts taken apart without a change, quantized and read back one by one.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import attrs
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import quark
from quark.config.algorithm import AlgoConfig
from quark.config.architecture import Architecture
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.errors import ConfigError
from quark.models.layers import QuantizedLayer
from quark.models.layers.experts import SeparateExperts, showing_all
from quark.models.plan.mixtures import fused_parameters, separate_experts
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark_templates.examples import EXPERTS, config_of
from quark_templates.plugin import MIXTURES

from .caches import REFUSED, eight_bit_cache

IDS = torch.arange(3, 63).reshape(3, 20)


def model_of(model_type: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(model_type), dtype=dtype).eval()
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    return model


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture(params=sorted(MIXTURES))
def model_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def facts_of(model_type: str) -> Architecture:
    found: Architecture = quark.templates().load_architecture(model_type)
    return found


def blocks(model: nn.Module, facts: Architecture) -> nn.ModuleList:
    found = model.get_submodule(facts.decoder_blocks or "")
    assert isinstance(found, nn.ModuleList)
    return found


def test_every_linear_of_a_block_is_named_and_every_name_exists(model_type: str) -> None:
    model, facts = model_of(model_type), facts_of(model_type)
    assert facts.model_type == model.config.model_type == model_type
    assert [model.get_submodule(name) for name in facts.embeddings] == [model.get_input_embeddings()]
    assert model.get_submodule(facts.head or "") is model.get_output_embeddings()
    assert model.get_submodule(facts.final_norm or "").weight.shape == (32,)
    attention = {*facts.attention_inputs, *facts.attention_inner, facts.attention_output or ""}
    dense = {*facts.mlp_inputs, facts.mlp_output or ""} - {""}
    sparse = 0
    for block in blocks(model, facts):
        linear = {name for name, m in block.named_modules() if isinstance(m, nn.Linear)}
        mixture = any(name == facts.experts for name, _ in block.named_modules())
        mixes = any(name.startswith("self_attn") for name in linear)
        known = (attention if mixes else set(facts.mixer)) | (set(facts.shared_experts) if mixture else dense)
        assert known <= linear
        assert all(any(fnmatchcase(f"model.layers.0.{n}", p) for p in facts.exclude_layers_name) for n in linear - known)
        assert {block.get_submodule(norm or "").weight.shape for norm in (facts.attention_norm, facts.mlp_norm)} == {(32,)}
        if mixture:
            sparse += 1
            assert block.get_submodule(facts.router or "").weight.shape == (EXPERTS, 32)
    assert sparse == (1 if dense else 2)


def test_separating_experts_keeps_the_logits_and_copies_nothing(model_type: str) -> None:
    model, facts = model_of(model_type, torch.float64), facts_of(model_type)
    before = logits(model)
    fused = {model.get_parameter(name).data_ptr() for name in fused_parameters(model)}
    names = separate_experts(model, LLMTemplate.get(model_type).get_config("int4_wo_32"))
    assert names == [f"model.layers.{i}.{facts.experts}" for i in ((1,) if facts.mlp_output else (0, 1))]
    assert (logits(model) - before).abs().max() < 1e-12
    assert {model.get_submodule(f"{name}.0.down_proj").weight.data_ptr() for name in names} <= fused
    assert list(fused_parameters(model)) == []


@pytest.mark.one_in(8)
@pytest.mark.parametrize("scheme", ["int4_wo_32", "fp8", "mxfp4", "nvfp4"])
def test_experts_are_quantized_one_by_one_and_read_back(model_type: str, scheme: str, tmp_path: Path) -> None:
    model = model_of(model_type)
    config = LLMTemplate.get(model_type).get_config(scheme, **eight_bit_cache(model_type))
    ModelQuantizer(config).quantize_model(model, list(IDS.split(1)))
    experts = [m for m in model.modules() if isinstance(m, SeparateExperts)]
    assert {len(list(m.children())) for m in experts} == {EXPERTS}
    assert all(isinstance(layer, QuantizedLayer) for m in experts for expert in m.children() for layer in expert.children())
    export_safetensors(model, tmp_path / "out")
    expected = logits(model)
    assert expected.isfinite().all()
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "out")), expected)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), expected)


def test_a_cache_is_refused_where_runtimes_hold_something_else(model_type: str) -> None:
    quantizer = ModelQuantizer(LLMTemplate.get(model_type).get_config("fp8", kv_cache_scheme="fp8"))
    if model_type not in REFUSED:
        assert quantizer.plan(model_of(model_type)).config.kv_cache_post_rope is True
        return
    with pytest.raises(ConfigError, match=r"so runtimes do not cache it.*kv_cache_post_rope=False"):
        quantizer.plan(model_of(model_type))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("algorithm", [["gptq"], ["awq", "qronos"]], ids="+".join)
def test_experts_are_rounded_for_their_own_tokens_and_read_back(model_type: str, algorithm: list[str], tmp_path: Path) -> None:
    template = LLMTemplate.get(model_type)
    names = [name for name in algorithm if template.algo_config[name] is not None]
    model = ModelQuantizer(template.get_config("int4_wo_32", algorithm=names)).quantize_model(model_of(model_type), list(IDS.split(1)))
    tokens = model.quark_report.tokens
    rounded = model.quark_report.layers
    assert tokens
    assert {n for n in tokens if tokens[n]} <= set(rounded)
    assert set(model.quark_report.unreached) == {n for n in tokens if not tokens[n]}
    assert all(rounded[n]["tokens"] == tokens[n] for n in tokens if tokens[n])
    export_safetensors(model, tmp_path / "out")
    expected = logits(model)
    assert expected.isfinite().all()
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "out")), expected)


def test_excluded_experts_stay_fused_and_the_plan_says_so() -> None:
    model = model_of("mixtral")
    template = LLMTemplate.get("mixtral")
    config = template.get_config("int4_wo_32", exclude_layers=[*template.exclude_layers_name, "*experts*"])
    plan = ModelQuantizer(config).plan(model)
    assert any("4 fused matrices of experts stay float" in note for note in plan.notes)
    assert not any(isinstance(m, SeparateExperts) for m in model.modules())


def test_every_expert_can_be_calibrated_on_every_token() -> None:
    """Then all experts of a layer have the range of its whole input; the function stays the same."""
    config_ = LLMTemplate.get("mixtral").get_config("fp8")
    config_.calibrate_all_experts = True
    model = ModelQuantizer(config_).quantize_model(model_of("mixtral"), list(IDS.split(1)))
    mixture = model.get_submodule("model.layers.0.mlp.experts")
    assert isinstance(mixture, SeparateExperts)
    assert not mixture.shows_all, "only while calibrating"
    inputs = {float(expert.up_proj.input_quantizer.scale) for expert in mixture.children()}
    assert len(inputs) == 1
    routed = ModelQuantizer(LLMTemplate.get("mixtral").get_config("fp8")).quantize_model(model_of("mixtral"), list(IDS.split(1)))
    own = {float(e.up_proj.input_quantizer.scale) for e in routed.get_submodule("model.layers.0.mlp.experts").children()}
    assert max(own) == max(inputs)
    assert len(own) > 1
    separate = model_of("mixtral", torch.float64)
    separate_experts(separate, config_)
    before = logits(separate)
    with showing_all(separate, True):
        assert torch.equal(logits(separate), before)


def rotatable(model_type: str, **settings: bool) -> AlgoConfig:
    own = LLMTemplate.get(model_type).algo_config["rotation"]
    if own is None:
        pytest.skip("the family has no rotation")
    return attrs.evolve(own, **settings)


def test_a_mixture_is_rotated_without_being_quantized(model_type: str) -> None:
    model = model_of(model_type)
    before, embedded = logits(model), model.get_input_embeddings().weight.clone()
    config = QConfig(global_quant_config=QLayerConfig(), algo_config=[rotatable(model_type, r1=True, r4=True)])
    ModelQuantizer(config).quantize_model(model)
    assert not torch.allclose(model.get_input_embeddings().weight, embedded)
    torch.testing.assert_close(logits(model), before, rtol=1e-3, atol=1e-3 * before.abs().max().item())


@pytest.mark.parametrize("r4", [False, True])
def test_a_rotated_mixture_whose_experts_stay_float_reads_back(model_type: str, r4: bool, tmp_path: Path) -> None:
    template = LLMTemplate.get(model_type)
    exclude = [*template.exclude_layers_name, "*experts*"]
    config = template.get_config(
        "int4_wo_32", exclude_layers=exclude, algo_configs={"rotation": rotatable(model_type, r4=r4)}, algorithm=["rotation"]
    )
    model = ModelQuantizer(config).quantize_model(model_of(model_type))
    export_safetensors(model, tmp_path / "out")
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "out")), logits(model))
