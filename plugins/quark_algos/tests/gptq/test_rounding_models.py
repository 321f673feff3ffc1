"""Whatever a model is made of: biases, transposed weights, experts, tied embeddings, no blocks.

Exports reload.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, Qwen2Config

import quark
from quark.config.algorithm import AlgoConfig
from quark.config.model import QConfig
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark_algos.gptq.config import GPTAQConfig, GPTQConfig
from quark_tiny_model import calibration_batches, tiny_model, tiny_template

from ..runs import BLOCKS, LAYERS, QRONOS, data, error, float_model, layers, off_grid, quantized, to_nearest


def test_a_bfloat16_model_stays_one() -> None:
    model = quantized(GPTQConfig(), dtype=torch.bfloat16)
    assert {layer.weight.dtype for layer in layers(model).values()} == {torch.bfloat16}
    assert len(model.quark_report.layers) == LAYERS
    assert error(model) < error(to_nearest(dtype=torch.bfloat16))


def test_the_tied_head_is_left_alone_or_rounded_to_nearest_and_embeddings_stay() -> None:
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_64", exclude_layers=[])
    config.algo_config = [GPTQConfig()]
    model: Any = ModelQuantizer(config).quantize_model(copy.deepcopy(float_model()), data())
    before: Any = float_model()
    assert torch.equal(model.model.embed_tokens.weight, before.model.embed_tokens.weight)
    assert not torch.equal(model.lm_head.weight, before.lm_head.weight)
    assert "lm_head" not in model.quark_report.layers
    kept = quantized(GPTQConfig())
    assert kept.lm_head.weight is kept.model.embed_tokens.weight


SIZES = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
LLAMA_LIKE = {**SIZES, "intermediate_size": 128, "num_key_value_heads": 2}
FAMILIES: dict[str, Any] = {
    "qwen2": Qwen2Config(**LLAMA_LIKE),
    "gpt2": GPT2Config(**SIZES),
}
WORDS = torch.randint(0, 64, (16, 32), generator=torch.Generator().manual_seed(0))


def family(name: str) -> nn.Module:
    """A random model with act_order weights and, if it has them, biases."""
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(FAMILIES[name]).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if key.endswith(".bias") else 0.1))
    return model


def of_family(name: str, algorithm: str | None, batches: list[Tensor]) -> Any:
    config = LLMTemplate.get(name).get_config(scheme="int4_wo_32", algorithm=algorithm)
    return ModelQuantizer(config).quantize_model(family(name), batches)


def mixture(algorithm: str | None, batches: list[Tensor]) -> Any:
    config = tiny_template("mixture").get_config(scheme="int4_wo_64", algorithm=algorithm)
    return ModelQuantizer(config).quantize_model(tiny_model(kind="mixture"), batches)


@pytest.mark.parametrize("algorithm", ["gptq", "gptaq", "qronos"])
@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_layers_with_biases_and_transposed_weights_get_better_outputs(name: str, algorithm: str) -> None:
    model, plain, before = of_family(name, algorithm, [WORDS]), of_family(name, None, [WORDS]), family(name)
    assert set(model.quark_report.layers) == set(layers(model))
    biases = {k: v for k, v in before.state_dict().items() if k.endswith(".bias")}
    assert biases
    assert all(torch.equal(model.state_dict()[k], v) for k, v in biases.items())
    with torch.no_grad():
        expected = before(WORDS).logits
        errors = [float((m(WORDS).logits - expected).square().mean()) for m in (model, plain)]
    assert errors[0] < 0.7 * errors[1]
    assert not off_grid(model)


def test_experts_with_few_tokens_are_rounded_cautiously_and_those_with_none_rounded_to_nearest_and_all_is_told() -> None:
    words = calibration_batches(1, 20)
    model, plain = mixture("gptq", words), mixture(None, words)
    said, counts = model.quark_report.layers, model.quark_report.tokens
    experts = {n for n in layers(model) if ".experts." in n}
    silent = {n for n in experts if counts[n] == 0}
    assert 0 < len(silent) < len(experts) == 48
    assert set(model.quark_report.unreached) == silent
    assert silent.isdisjoint(said)
    for name in silent:
        assert torch.equal(layers(model)[name].weight, layers(plain)[name].weight), name
    for name in experts - silent:
        assert said[name]["tokens"] == counts[name] < 64, name
        assert said[name]["few_tokens"], name
        assert 0 < said[name]["shrinkage"] <= 1, name
    assert any("No calibration token reached" in line for line in model.quark_report.lines())
    assert not off_grid(model)
    with torch.no_grad():
        assert model(words[0]).logits.isfinite().all()


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 32)).eval()


@pytest.mark.parametrize("settings", [GPTQConfig(), GPTAQConfig(), QRONOS], ids=lambda s: s.name)
def test_a_model_that_is_no_decoder_is_one_block(settings: AlgoConfig) -> None:
    x = torch.randn(600, 64, generator=torch.Generator().manual_seed(0)) @ torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    config = QConfig(global_quant_config=quark.schemes().load_config("int4_wo_32")(), algo_config=[settings])
    model: Any = ModelQuantizer(config).quantize_model(mlp(), [x[:150], x[150:400]])
    assert {n: f["tokens"] for n, f in model.quark_report.layers.items()} == {"0": 400, "2": 400, "4": 400}
    plain = ModelQuantizer(attrs.evolve(config, algo_config=None)).quantize_model(mlp())
    with torch.no_grad():
        expected = mlp()(x[400:])
        assert (model(x[400:]) - expected).square().mean() < 0.9 * (plain(x[400:]) - expected).square().mean()


def test_channels_that_are_never_active_get_no_weight_if_tokens_are_enough_to_tell() -> None:
    model = mlp()
    with torch.no_grad():
        model[0].bias[[5, 40]] = -100.0
    config = QConfig(global_quant_config=quark.schemes().load_config("int4_wo_32")(), algo_config=[GPTQConfig()])
    x = torch.randn(400, 64, generator=torch.Generator().manual_seed(0))
    enough, few = (ModelQuantizer(config).quantize_model(copy.deepcopy(model), [x[:tokens]]) for tokens in (400, 60))
    for done in (enough, few):
        assert done.quark_report.layers["2"]["dead"] >= 2  # type: ignore[union-attr]
    assert enough.quark_report.layers["2"]["dead"] == 2  # type: ignore[union-attr]
    assert [c for c in range(96) if not enough[2].weight[:, c].any()] == [5, 40]  # type: ignore[index]
    assert few[2].weight.any(0).all(), "60 tokens are not enough to tell"  # type: ignore[index]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", ["int4_wo_64", "mxfp4", "nvfp4", "int4_fp8", "mx6"])
def test_what_is_exported_reloads_to_the_same_logits(scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = quantized(GPTQConfig(), scheme, dtype=dtype)
    export_safetensors(model, tmp_path / "out")
    with torch.no_grad():
        expected, found = (m(data()[0]).logits for m in (model, import_model_from_safetensors(None, tmp_path / "out")))
    assert torch.equal(found, expected)


def test_names_that_no_layer_has_are_told_of_before_any_work() -> None:
    names = ["self_attn.q_proj", "block_sparse_moe.experts.*.w1"]
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_64")
    config.algo_config = [GPTQConfig(inside_layer_modules=names)]
    (warning,) = ModelQuantizer(config).plan(float_model()).warnings
    assert warning.startswith(
        f"the settings of 'gptq' name layers that no decoder block has: block_sparse_moe.experts.*.w1. {LAYERS - BLOCKS} quantized"
    )
    for found in (names[:1], []):
        config.algo_config = [GPTQConfig(inside_layer_modules=found)]
        assert ModelQuantizer(config).plan(float_model()).warnings == ()
