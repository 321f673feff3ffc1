"""The weight converters of templates.

Fused experts, as transformers saves them, become the layers that are quantized.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import quark
from quark.config.architecture import Architecture
from quark.models.layers.experts import SeparateExperts
from quark.models.plan.mixtures import separate_experts
from quark.torch import LLMTemplate

from .converted import converted

IDS = torch.arange(3, 23).reshape(2, 10)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OWN_SIZES: dict[str, dict[str, object]] = {
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4},
    "granitemoehybrid": {
        "num_local_experts": 4,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
    },
}
FUSED = ("gpt_oss", "granitemoehybrid")
"""Families that transformers saves with fused experts."""


def model_of(model_type: str) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES, **OWN_SIZES[model_type])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def converters_of(model_type: str) -> list[Any]:
    found = LLMTemplate.get(model_type).f2f_weight_converters
    assert found is not None
    return found


def facts_of(model_type: str) -> Architecture:
    found: Architecture = quark.templates().load_architecture(model_type)
    return found


def saved(model_type: str, directory: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a checkpoint of a tiny model, and the tensors of its single experts.

    Experts are named as when they are quantized.
    """
    model = model_of(model_type)
    model.save_pretrained(directory)
    separate_experts(model, LLMTemplate.get(model_type).get_config("int4_wo_32"))
    mixtures = [f"{name}." for name, m in model.named_modules() if isinstance(m, SeparateExperts)]
    experts = {name: t for name, t in model.state_dict().items() if name.startswith(tuple(mixtures))}
    return load_file(directory / "model.safetensors"), experts


@pytest.mark.parametrize("model_type", FUSED)
def test_converters_give_the_separate_experts_of_the_model(model_type: str, tmp_path: Path) -> None:
    stored, experts = saved(model_type, tmp_path)
    result = converted(stored, converters_of(model_type))
    assert not experts.keys() & stored.keys()
    assert experts.keys() <= result.keys()
    assert all(torch.equal(result[name], experts[name]) for name in experts)
    assert not [name for name, tensor in result.items() if tensor.ndim == 3 and "conv1d" not in name]
    storages = {tensor.untyped_storage().data_ptr() for tensor in stored.values()}
    is_transposed = model_type == "gpt_oss"  # which transformers' operation copies
    assert is_transposed or {tensor.untyped_storage().data_ptr() for tensor in result.values()} == storages


def test_templates_have_the_converters_of_their_family_and_dense_ones_none() -> None:
    assert len(converters_of("gpt_oss")) == len(facts_of("gpt_oss").weight_converters) == 4
    assert LLMTemplate.get("llama").f2f_weight_converters is None
