"""Biases whose codes share bytes come back from a checkpoint, in our reader and in transformers."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from quark.config.model import QConfig
from quark.config.tensor import QTensorConfig
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors

IDS = torch.arange(24).reshape(2, 12)


def bias_spec(dtype: str) -> QTensorConfig:
    return QTensorConfig(dtype=dtype, qscheme="per_tensor", is_dynamic=False, symmetric=True, observer_cls="PerTensorMinMaxObserver")


def qwen2_with_biases() -> nn.Module:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=56,  # 28 codes of keys do not fill whole words
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return model


def config_with_bias(dtype: str) -> QConfig:
    config = LLMTemplate.get("qwen2").get_config(scheme="int4_wo_per_channel")
    config.global_quant_config = attrs.evolve(config.global_quant_config, bias=bias_spec(dtype))
    return config


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2", "int3", "int8"])
def test_a_quantized_bias_reloads_to_the_same_logits(dtype: str, tmp_path: Path) -> None:
    model = ModelQuantizer(config_with_bias(dtype)).quantize_model(qwen2_with_biases())
    bias = model.model.layers[0].self_attn.q_proj.bias
    assert bias.unique().numel() <= 2 ** int(re.sub(r"\D", "", dtype)), "the bias is quantized"
    export_safetensors(model, tmp_path / "out")
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "out", device="cpu")), logits(model))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))
