"""Tiny models of two decoder blocks, of families that differ in the modules on their residual stream.

In float64 throughout.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import quark
from quark.base.version import transformers_version
from quark.config.architecture import Architecture
from quark.models.plan.mixtures import separate_experts
from quark.torch import LLMTemplate
from quark_devkit.small_models import InFloat64

WIDTH, HEADS, HEAD = 32, 4, 8
SIZES = {
    "vocab_size": 64,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "ffn_dim": 64,
    "word_embed_proj_dim": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "head_dim": HEAD,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OWN_SIZES: dict[str, dict[str, Any]] = {"phi": {"num_key_value_heads": HEADS}, "qwen3_moe": {"num_experts": 3}}
IDS = torch.arange(3, 43).reshape(2, 20)


def facts_of(model_type: str) -> Architecture:
    found: Architecture = quark.templates().load_architecture(model_type)
    return found


def model_of(model_type: str, dtype: torch.dtype = torch.float64, **other: Any) -> nn.Module:
    """Weights of norms are far from 1, their biases and others from 0; experts are separate layers."""
    default = AutoConfig.for_model(model_type)
    known = {*default.to_dict(), *default.attribute_map}
    sizes = {name: size for name, size in SIZES.items() if name in known} | OWN_SIZES.get(model_type, {}) | other
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes), dtype=torch.float32).eval().requires_grad_(False)
    if (head := facts_of(model_type).head) not in dict(model.named_modules()):
        pytest.skip(f"transformers {transformers_version()} has a {model_type} without {head}")
    for parameter in model.parameters():
        # What a block adds is not small beside what it is given.
        parameter.copy_(parameter * 5 if parameter.ndim > 1 else parameter + torch.rand(parameter.shape) * 0.6)
    separate_experts(model, LLMTemplate.get(model_type).get_config("int4_wo_32"))
    return model.to(dtype)


def blocks_of(model: nn.Module, facts: Architecture) -> list[nn.Module]:
    return list(model.get_submodule(facts.decoder_blocks or "").children())


def logits(model: nn.Module) -> Tensor:
    """In float64."""
    with torch.no_grad(), InFloat64():
        found: Tensor = model(IDS).logits
    assert found.dtype is torch.float64
    return found


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())
