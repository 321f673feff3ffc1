"""LFM2, whose blocks convolve or attend: every fact on a tiny model of both, and the whole way round."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import quark
from quark.base.version import transformers_version
from quark.config.architecture import Architecture
from quark.models.layers import QuantizedLayer
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark_templates.plugin import CONVOLUTIONAL

IDS = torch.arange(3, 43).reshape(2, 20)
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
LAYERS = ["conv", "full_attention"]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "lfm2", **SIZES, num_hidden_layers=2, layer_types=LAYERS, block_auto_adjust_ff_dim=False, bos_token_id=1, eos_token_id=2
    )
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for vector in (p for p in made.parameters() if p.ndim == 1):
            vector.normal_(mean=1.0, std=0.1)
    return made


@pytest.fixture
def facts() -> Architecture:
    found: Architecture = quark.templates().load_architecture("lfm2")
    return found


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS).logits
    return found


def linears(module: nn.Module) -> list[str]:
    return [name for name, m in module.named_modules() if isinstance(m, nn.Linear)]


def test_the_group_is_what_is_checked_here() -> None:
    assert set(CONVOLUTIONAL) == {"lfm2"}


def test_every_linear_is_named_once_and_mixers_and_head_stay_float(model: nn.Module, facts: Architecture) -> None:
    mlp = {*facts.mlp_inputs, facts.mlp_output or ""}
    attention = {*facts.attention_inputs, facts.attention_output or ""}
    blocks = model.get_submodule(facts.decoder_blocks or "")
    assert [set(linears(block)) for block in blocks] == [set(facts.mixer) | mlp, attention | mlp]
    floats = {name for name in linears(model) if any(fnmatchcase(name, p) for p in facts.exclude_layers_name)}
    assert floats == {"lm_head", *(f"model.layers.0.{name}" for name in facts.mixer)}
    assert [model.get_submodule(name) for name in facts.embeddings] == [model.get_input_embeddings()]
    assert model.get_submodule(facts.head or "") is model.get_output_embeddings()


def test_norms_feed_the_projections_named_with_them(model: nn.Module, facts: Architecture) -> None:
    came_in: dict[str, Tensor] = {}
    went_out: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            came_in[name], went_out[name] = args[0], output

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) or "Norm" in type(module).__name__:
            module.register_forward_hook(watch(name))
    logits(model)
    assert torch.equal(came_in[facts.head or ""], went_out[facts.final_norm or ""])
    for index, first in enumerate((facts.mixer[:1], facts.attention_inputs)):
        at = f"{facts.decoder_blocks}.{index}."
        assert all(came_in[at + name] is went_out[f"{at}{facts.attention_norm}"] for name in first)
        assert all(came_in[at + name] is went_out[f"{at}{facts.mlp_norm}"] for name in facts.mlp_inputs)


def test_kv_layers_put_out_what_the_cache_holds(model: nn.Module, facts: Architecture) -> None:
    key, value = facts.kv_layers_name or ()
    assert [name for name in linears(model) if fnmatchcase(name, key)] == ["model.layers.1.self_attn.k_proj"]
    put_out: list[Tensor] = []
    (name,) = (name for name in linears(model) if fnmatchcase(name, value))
    model.get_submodule(name).register_forward_hook(lambda _, args, out: put_out.append(out))
    with torch.no_grad():
        cached = model(IDS, use_cache=True).past_key_values
    if not hasattr(cached, "layers"):
        pytest.skip(f"transformers {transformers_version()} caches keys in a class of that family")
    held = cached.layers[1]
    assert torch.equal(put_out[0], held.values.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("scheme", ["int4_wo_32", "fp8", "mxfp4"])
def test_a_quantized_model_is_read_back_with_the_same_logits(model: nn.Module, scheme: str, tmp_path: Path) -> None:
    quantized = ModelQuantizer(LLMTemplate.get("lfm2").get_config(scheme, kv_cache_scheme="fp8")).quantize_model(model, list(IDS.split(1)))
    assert sum(isinstance(m, QuantizedLayer) for m in quantized.modules()) == 3 + 4 + 3
    export_safetensors(quantized, tmp_path / "out")
    expected = logits(quantized)
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "out")), expected)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), expected)
