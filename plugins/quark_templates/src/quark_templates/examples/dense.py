"""Sizes of tiny models: dense ones, ones with convolutions, ones with vision towers, and their text parts."""

from __future__ import annotations

from typing import Any

__all__ = ["CONVOLUTIONAL", "EXPERTS", "OTHER_NAMES", "PARTS", "SIZES", "sizes_of"]


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


EXPERTS = 4
LINEAR_FIRST = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MIXTURE = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {**MIXTURE, "shared_expert_intermediate_size": 32}
CROSS = {"num_hidden_layers": 3, "cross_attention_layers": [1], "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
SIGHT = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
VISUAL = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
TILES = {
    **SIGHT,
    "attention_heads": 2,
    "num_global_layers": 1,
    "intermediate_layers_indices": [0],
    "vision_output_dim": 64,
    "supported_aspect_ratios": [[1, 1]],
    "max_num_tiles": 1,
}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, "mrope_section": [2, 1, 1]}}
SLIM = {**VISUAL, "fullatt_block_indexes": [0], "image_size": 16}
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
UNIFIED_SIGHT = {"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 32, "mm_posemb_size": 8, "output_proj_dims": 32}
GLIMPSES = {**SIGHT, "pos_emb_height": 4, "pos_emb_width": 4}
PARTS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "gemma3": ({}, SIGHT),
    "gemma4_unified": ({**WINDOWED, "global_head_dim": 16}, UNIFIED_SIGHT),
    "glm4v": (SECTIONS, SLIM),
    "internvl": ({}, {**SIGHT, "image_size": [16, 16], "patch_size": [4, 4]}),
    "llava": ({}, SIGHT),
    "mistral3": ({}, SIGHT),
    "mllama": (CROSS, TILES),
    "muse_glimmer": (WINDOWED, GLIMPSES),
    "qwen2_vl": (SECTIONS, {**VISUAL, "embed_dim": 32, "mlp_ratio": 2}),
    "qwen2_5_vl": (SECTIONS, SLIM),
    "qwen3_5": (LINEAR_FIRST, VISUAL),
    "qwen3_5_moe": ({**LINEAR_FIRST, **SHARED}, VISUAL),
    "qwen3_5_text": (LINEAR_FIRST, None),
    "qwen3_5_moe_text": ({**LINEAR_FIRST, **SHARED}, None),
    "qwen3_vl": ({}, VISUAL),
    "qwen3_vl_moe": (MIXTURE, VISUAL),
}
"""Differences in the text config, and the vision config where there is one."""

BESIDE: dict[str, dict[str, Any]] = {
    "gemma3": {"image_token_index": 5, "mm_tokens_per_image": 4},
    "gemma4_unified": {"audio_config": {"audio_embed_dim": 32}, "image_token_id": 5},
    "muse_glimmer": {"out_hidden_size": 128, "projector_hidden_size": 32},
}
"""Differences beside these parts."""


def sizes_of(model_type: str) -> dict[str, Any]:
    """Return the arguments of the configuration of a family."""
    text, vision = PARTS[model_type]
    sizes: dict[str, Any] = {**SIZES, **text} if vision is None else {"text_config": {**SIZES, **text}, "vision_config": vision}
    return {**sizes, **BESIDE.get(model_type, {})}
