"""Sizes of tiny dense models, and of those whose blocks convolve or attend."""

from __future__ import annotations

from typing import Any

__all__ = ["CONVOLUTIONAL", "OTHER_NAMES", "SIZES"]

SIZES: dict[str, Any] = {
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
OTHER_NAMES: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "gptj": {"n_inner": 64, "rotary_dim": 4},
}
"""Sizes whose names differ in a family."""
CONVOLUTIONAL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": ["conv", "full_attention"],
    "block_auto_adjust_ff_dim": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""One block of each kind."""
