"""GGUF files hold the model.

Transformers loads them to the same logits, and their metadata say what llama.cpp asks for.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from quark.base.version import transformers_version
from quark.checkpoint.export import export_with
from quark.checkpoint.exporter import ExportOptions
from quark.config.model import QConfig
from quark.errors import ConfigError, MissingPluginError, UnsupportedError
from quark.plugins import schemes
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate, ModelQuantizer
from quark_tiny_model import calibration_batches, tiny_model, tiny_model_dir, tiny_tokenizer

gguf = pytest.importorskip("gguf", reason="the extra quark-exporters[gguf] is not installed")

SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
}
IDS = torch.arange(24)[None] * 7
HALF = 2.0**-11
"""Relative error of a number in float16."""


def model_of(config: Any) -> nn.Module:
    """A model of that configuration, none of whose vectors is a constant."""
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model


def quantized(scheme: str = "int4_wo_32", config: Any = None) -> nn.Module:
    model = tiny_model() if config is None else model_of(config)
    family = "llama" if config is None else config.model_type
    return ModelQuantizer(LLMTemplate.get(family).get_config(scheme=scheme)).quantize_model(model, calibration_batches(2, 32))


def exported(model: nn.Module, tmp_path: Path, **options: Any) -> Path:
    export_with("gguf", model, tmp_path / "out", ExportOptions(tokenizer=tiny_tokenizer(), **options))
    return tmp_path / "out"


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(IDS).logits
    return result


def reader(directory: Path) -> Any:
    return gguf.GGUFReader(directory / "model.gguf")


def field(directory: Path, key: str) -> Any:
    return reader(directory).get_field(key).contents()


@pytest.mark.parametrize("scheme", ["int4_wo_32", "int4_wo_64", "uint4_wo_32", "mxfp4_weight_only"])
def test_transformers_loads_the_same_model_and_tokenizer(scheme: str, tmp_path: Path) -> None:
    model = quantized(scheme)
    out = exported(model, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(out, gguf_file="model.gguf")
    error = float((logits(loaded) - logits(model)).norm() / logits(model).norm())
    # Each scale errs by at most half a unit of float16; errors of independent scales add up as their squares
    # do.
    assert error <= (0.0 if scheme.startswith("mxfp4") else 2 * HALF)
    tokenizer = AutoTokenizer.from_pretrained(out, gguf_file="model.gguf")
    text = "It's 1789, and the naïve cat sat."
    ids, expected = tokenizer(text)["input_ids"], tiny_tokenizer()(text)["input_ids"]
    if Version(transformers_version() or "0") < Version("5.5") and ids == [tokenizer.bos_token_id, *expected]:
        pytest.skip(f"transformers {transformers_version()} begins each text with a BOS, whatever the file says")
    assert ids == expected


@pytest.mark.parametrize(
    "config",
    [Qwen2Config(**SIZES), Qwen3Config(**SIZES, head_dim=128), LlamaConfig(**SIZES, model_type="mistral")],
    ids=["qwen2", "qwen3", "llama"],
)
def test_other_families_load_to_the_same_logits(config: Any, tmp_path: Path) -> None:
    model = quantized("mxfp4_weight_only", config)
    loaded = AutoModelForCausalLM.from_pretrained(exported(model, tmp_path), gguf_file="model.gguf")
    assert torch.equal(logits(loaded), logits(model))


def test_experts_are_stacked(tmp_path: Path) -> None:
    own = {"moe_intermediate_size": 768, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 128, "decoder_sparse_step": 1}
    model = quantized("mxfp4_weight_only", Qwen3MoeConfig(**SIZES, **own, norm_topk_prob=True, mlp_only_layers=[]))
    out = exported(model, tmp_path)
    shapes = {tensor.name: tuple(map(int, tensor.shape)) for tensor in reader(out).tensors}
    assert shapes["blk.1.ffn_gate_exps.weight"] == (64, 768, 4)
    assert field(out, "qwen3moe.expert_used_count") == 2
    loaded = AutoModelForCausalLM.from_pretrained(out, gguf_file="model.gguf")
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-4, atol=1e-5)  # the experts' sums are in another order


def test_mixtures_of_mixtral_are_written_too(tmp_path: Path) -> None:
    out = exported(quantized("int4_wo_32", MixtralConfig(**SIZES, num_local_experts=4)), tmp_path)
    assert {"blk.0.ffn_down_exps.weight", "blk.0.ffn_gate_inp.weight"} <= {tensor.name for tensor in reader(out).tensors}
    assert field(out, "llama.expert_count") == 4


@pytest.mark.parametrize("float_type", ["auto", "bf16", "f16"])
def test_routers_are_float32_in_a_model_of_any_dtype(float_type: str, tmp_path: Path) -> None:
    model = quantized("int4_wo_32", MixtralConfig(**SIZES, num_local_experts=4, dtype="bfloat16")).bfloat16()
    export_with("gguf", model, tmp_path / "out", ExportOptions(tokenizer=tiny_tokenizer(), own={"float_type": float_type}))
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader(tmp_path / "out").tensors}
    assert kinds["blk.0.ffn_gate_inp.weight"] == "F32"
    assert kinds["token_embd.weight"] == {"auto": "BF16"}.get(float_type, float_type.upper())


@pytest.mark.parametrize("scheme", ["int4_wo_32", "mxfp4_weight_only"])
def test_from_disk_the_file_is_the_same(scheme: str, tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config(scheme=scheme)
    model = ModelQuantizer(config).quantize_model(AutoModelForCausalLM.from_pretrained(tiny_model_dir()).eval())
    export_with("gguf", model, tmp_path / "memory")
    quantize_checkpoint(tiny_model_dir(), tmp_path / "disk", config, exporter="gguf")
    assert (tmp_path / "memory/model.gguf").read_bytes() == (tmp_path / "disk/model.gguf").read_bytes()


def test_metadata_say_what_the_model_is(tmp_path: Path) -> None:
    model = quantized("uint4_wo_32")
    out = exported(model, tmp_path)
    config: Any = model.config
    expected = {
        "general.architecture": "llama",
        "general.file_type": gguf.LlamaFileType.MOSTLY_Q4_1,
        "llama.block_count": 3,
        "llama.rope.freq_base": config.rope_parameters["rope_theta"],
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": config.head_dim,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.eos_token_id": 0,
    }
    assert {key: field(out, key) for key in expected} == expected
    assert field(out, "tokenizer.ggml.token_type")[0] == gguf.TokenType.CONTROL
    assert json.loads(field(out, "quark.quantization_config"))["global_quant_config"]["weight"]["dtype"] == "uint4"
    assert "output.weight" not in {tensor.name for tensor in reader(out).tensors}  # tied to the embedding


def test_factors_of_llama_3_are_those_of_transformers(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = quantized("int4_wo_32", LlamaConfig(**SIZES, rope_parameters={**rope, "original_max_position_embeddings": 64}))
    out = exported(model, tmp_path)
    stored = next(torch.from_numpy(t.data.copy()) for t in reader(out).tensors if t.name == "rope_freqs.weight")
    plain = 5e5 ** -(torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(plain / stored, model.model.rotary_emb.inv_freq)  # type: ignore[union-attr, operator]


@pytest.mark.parametrize(("float_type", "kind"), [("f16", "F16"), ("bf16", "BF16"), ("f32", "F32"), ("auto", "F32")])
def test_matrices_that_are_not_quantized_are_of_the_type_that_is_asked_for(float_type: str, kind: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_with("gguf", quantized(), out, ExportOptions(own={"float_type": float_type}))
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader(out).tensors}
    assert kinds["token_embd.weight"] == kind
    assert kinds["output_norm.weight"] == "F32"


def test_rounded_values_are_written_of_any_scheme(tmp_path: Path) -> None:
    model = quantized("fp8")
    out = exported(model, tmp_path, weight_format="fake_quantized")
    loaded = AutoModelForCausalLM.from_pretrained(out, gguf_file="model.gguf")
    name = "model.layers.1.mlp.up_proj"
    assert torch.equal(loaded.get_submodule(name).weight, model.get_submodule(name).weight)


def test_codes_that_gguf_does_not_have_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"fp8_e4m3.*model\.layers\.\{0-2\}.*fake_quantized"):
        exported(quantized("fp8"), tmp_path)
    assert not (tmp_path / "out").exists()


def test_another_family_is_refused_by_name(tmp_path: Path) -> None:
    from transformers import PhiConfig

    model = quantized("int4_wo_32", PhiConfig(**SIZES))
    with pytest.raises(UnsupportedError, match="'phi'"):
        exported(model, tmp_path)


def test_a_network_that_is_no_transformers_model_is_refused_with_its_class(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(64, 64))
    spec = schemes().load_config("int4_wo_32")()
    model = ModelQuantizer(QConfig(global_quant_config=spec)).quantize_model(network)
    with pytest.raises(UnsupportedError, match="needs a transformers model, not a Sequential"):
        exported(model, tmp_path)


def test_settings_that_a_file_cannot_say_are_refused(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        **SIZES, num_experts=4, moe_intermediate_size=32, num_experts_per_tok=2, mlp_only_layers=[], norm_topk_prob=False
    )
    with pytest.raises(UnsupportedError, match="norm_topk_prob=True, but this model has False"):
        exported(quantized("int4_wo_32", config), tmp_path)


def test_an_unknown_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one of auto, f32"):
        export_with("gguf", quantized(), tmp_path / "out", ExportOptions(own={"float_type": "f8"}))


def test_without_the_package_the_message_has_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingPluginError, match=r"pip install 'quark-exporters\[gguf\]'"):
        exported(quantized(), tmp_path)
