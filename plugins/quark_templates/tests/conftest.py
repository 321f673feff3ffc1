"""A tiny randomly initialised model of each dense family, from transformers, with its `Architecture`."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

import quark
from quark.config.architecture import Architecture
from quark_templates.plugin import DENSE

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes of every family, as far as its configuration has the name. Groups of 32 divide both widths."""
OTHER_NAMES: dict[str, dict[str, int]] = {
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "gptj": {"n_inner": 64, "rotary_dim": 4},
}
"""Sizes whose names differ in a family."""


@cache
def tiny_model(model_type: str) -> nn.Module:
    """A float32 model in evaluation mode, the same object each time; tests that change it take a copy."""
    from transformers import AutoConfig, AutoModelForCausalLM

    default = AutoConfig.for_model(model_type)
    known = {*default.to_dict(), *default.attribute_map}
    sizes = {name: size for name, size in SIZES.items() if name in known} | OTHER_NAMES.get(model_type, {})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes), dtype=torch.float32).eval()
    with torch.no_grad():
        for vector in (p for p in model.parameters() if p.ndim == 1):
            vector.normal_(mean=1.0, std=0.1)  # fresh norms are all alike: which of them feeds what would not show
    return model


@pytest.fixture(params=sorted(DENSE))
def family(request: pytest.FixtureRequest) -> tuple[nn.Module, Architecture]:
    return tiny_model(request.param), quark.templates().load(request.param, "architecture")
