"""Tiny models of families that differ in how scales fold, and the output of their first decoder block.

In float64 throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import quark
from quark.config.architecture import Architecture
from quark.models.plan.mixtures import separate_experts
from quark.torch import LLMTemplate
from quark_devkit.small_models import InFloat64

HEADS = 4
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "word_embed_proj_dim": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "num_local_experts": 3,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OWN_SIZES: dict[str, dict[str, Any]] = {"phi": {"num_key_value_heads": 4}}
IDS = torch.arange(3, 43).reshape(2, 20)


def facts_of(model_type: str) -> Architecture:
    found: Architecture = quark.templates().load_architecture(model_type)
    return found


def model_of(model_type: str, dtype: torch.dtype = torch.float64, **other: Any) -> nn.Module:
    """Norms differ from each other and from 1, biases from 0, in one decoder block.

    Experts are separate layers.
    """
    default = AutoConfig.for_model(model_type)
    known = {*default.to_dict(), *default.attribute_map}
    sizes = {name: size for name, size in SIZES.items() if name in known} | OWN_SIZES.get(model_type, {}) | other
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes), dtype=torch.float32).eval()
    with torch.no_grad():
        for vector in (p for p in model.parameters() if p.ndim == 1):
            vector.add_(torch.rand(vector.shape) * 0.4)
        for matrix in (p for p in model.parameters() if p.ndim > 1):
            matrix.mul_(5)  # what a block adds is not small beside what it is given
    separate_experts(model, LLMTemplate.get(model_type).get_config("int4_wo_32"))
    return model.to(dtype)


def block_of(model: nn.Module, facts: Architecture) -> nn.Module:
    """The only decoder block."""
    return model.get_submodule(f"{facts.decoder_blocks}.0")


def runner(model: nn.Module, block: nn.Module) -> Callable[[], Tensor]:
    """Computes the output of the block in the model, ``[batch, tokens, channels]``."""
    put_out: list[Tensor] = []
    block.register_forward_hook(lambda m, args, out: put_out.append(out[0] if isinstance(out, tuple) else out))

    def run() -> Tensor:
        with torch.no_grad():
            if next(block.parameters()).dtype is torch.float64:
                with InFloat64():
                    model(IDS)
            else:
                model(IDS)
        return put_out.pop()

    return run
