"""Tiny models of the model families, with random weights. Tests run these models to check the facts of each
template.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

EXPERTS = 4
_MIXTURE = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_k"), 2),
    **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_INDEXER = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}
_LINEAR = {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_SIZES: dict[str, Any] = {
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
    **_MIXTURE,
    **_LATENT,
    **_INDEXER,
    **_LINEAR,
}
"""Name in a decoder's configuration → default size, if the configuration has the name.

Both widths are multiples of 32.
"""

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_UNGROUPED = {"num_key_value_heads": 4}
_LINEAR_FIRST = {"layer_types": ["linear_attention", "full_attention"]}
_WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
_SECTIONS = {"rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0, "mrope_section": [2, 1, 1]}}
_TURNS = {
    "intermediate_size": 32,
    "intermediate_size_mlp": 64,
    "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 2,
    "attention_chunk_size": 8,
}
_RUNS_OF_TOKENS = {
    "layer_types": ["linear_attention", "indexed_attention"],
    "hc_count": 2,
    "hc_lowrank": 8,
    "ple_layer_ids": [1],
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 16,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 2,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
}
_OWN_SIZES: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "gptj": {"n_inner": 64, "rotary_dim": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "gpt_oss": {"rope_parameters": _ROPE},
    "deepseek_v2": {**_UNGROUPED, "topk_method": "greedy"},
    "deepseek_v3": _UNGROUPED,
    "deepseek_v32": _UNGROUPED,
    "glm4_moe_lite": {**_UNGROUPED, "rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0}},
    "glm_moe_dsa": _UNGROUPED,
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
    },
    "qwen3_next": _LINEAR_FIRST,
    "gemma4_unified": {**_WINDOWED, "global_head_dim": 16},
    "glm4v": _SECTIONS,
    "mllama": {"num_hidden_layers": 3, "cross_attention_layers": [1], "rope_parameters": _ROPE},
    "muse_glimmer": _WINDOWED,
    "qwen2_vl": _SECTIONS,
    "qwen2_5_vl": _SECTIONS,
    "qwen3_5": _LINEAR_FIRST,
    "qwen3_5_moe": _LINEAR_FIRST,
    "qwen3_5_text": _LINEAR_FIRST,
    "qwen3_5_moe_text": _LINEAR_FIRST,
    "dbrx": {
        "d_model": 32,
        "max_seq_len": 64,
        "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 64, "moe_num_experts": EXPERTS, "moe_top_k": 2},
    },
    "deepseek_v4": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "qk_rope_head_dim": 2,
        "intermediate_size": 32,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "hc_mult": 2,
        "sliding_window": 16,
        "o_groups": 2,
        "o_lora_rank": 32,
        "index_topk": 2,
    },
    "gemma4": {**_WINDOWED, "global_head_dim": 16, "hidden_size_per_layer_input": 0, "enable_moe_block": True},
    "glm5_next": {
        **_UNGROUPED,
        "qk_rope_head_dim": 0,
        "layer_types": ["linear_attention", "indexed_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "indexer_types": ["full", "full"],
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "index_kpool": 2,
        "hc_mult": 2,
        "rope_parameters": _ROPE,
    },
    "kimi_k25": _UNGROUPED,
    "llama4": _TURNS,
    "llama4_text": _TURNS,
    "minimax_m3_vl": {
        "intermediate_size": 32,
        "dense_intermediate_size": 64,
        "rotary_dim": 4,
        "mlp_layer_types": ["dense", "sparse"],
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_head_dim": 8,
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
    },
    "qwen4_exp": _RUNS_OF_TOKENS,
    "qwen4_exp_text": _RUNS_OF_TOKENS,
}
"""Family → sizes that replace or extend the default sizes."""

_SIGHT = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
_SQUARE = {**_SIGHT, "image_size": 16}
_GRID = {**_SIGHT, "pos_emb_height": 4, "pos_emb_width": 4}
_TILES = {
    **_SQUARE,
    "attention_heads": 2,
    "num_global_layers": 1,
    "intermediate_layers_indices": [0],
    "vision_output_dim": 64,
    "supported_aspect_ratios": [[1, 1]],
    "max_num_tiles": 1,
}
_MERGED = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32}
_PLACED = {**_MERGED, "num_position_embeddings": 16}
_STACKED = {**_PLACED, "deepstack_visual_indexes": [0]}
_SLIM = {**_STACKED, "fullatt_block_indexes": [0], "image_size": 16}
_BESIDE: dict[str, dict[str, Any]] = {
    "gemma3": {"vision_config": _SQUARE, "image_token_index": 5, "mm_tokens_per_image": 4},
    "gemma4_unified": {
        "vision_config": {"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 32, "mm_posemb_size": 8, "output_proj_dims": 32},
        "audio_config": {"audio_embed_dim": 32},
        "image_token_id": 5,
    },
    "glm4v": {"vision_config": _SLIM},
    "internvl": {"vision_config": {**_SIGHT, "image_size": [16, 16], "patch_size": [4, 4]}},
    "llava": {"vision_config": _SQUARE},
    "mistral3": {"vision_config": _SQUARE},
    "mllama": {"vision_config": _TILES},
    "muse_glimmer": {"vision_config": {**_GRID, "image_size": 16}, "out_hidden_size": 128, "projector_hidden_size": 32},
    "qwen2_vl": {"vision_config": {**_STACKED, "embed_dim": 32, "mlp_ratio": 2}},
    "qwen2_5_vl": {"vision_config": _SLIM},
    "qwen3_5": {"vision_config": _STACKED},
    "qwen3_5_moe": {"vision_config": _STACKED},
    "qwen3_vl": {"vision_config": _STACKED},
    "qwen3_vl_moe": {"vision_config": _STACKED},
    "gemma4": {
        "vision_config": {**_SIGHT, "num_key_value_heads": 2, "head_dim": 16, "pooling_kernel_size": 2, "position_embedding_size": 8},
        "audio_config": {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "subsampling_conv_channels": [4, 4],
            "output_proj_dims": 32,
        },
        "tie_word_embeddings": False,
    },
    "glm5_next": {"vision_config": {**_MERGED, "projection_intermediate_size": 32}},
    "kimi_k25": {"vision_config": _GRID, "projection_hidden_size": 32, "tie_word_embeddings": False},
    "llama4": {"vision_config": {**_SQUARE, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}},
    "minimax_m3_vl": {"vision_config": _SQUARE, "projector_hidden_size": 32},
    "qwen4_exp": {"vision_config": _PLACED},
}
"""Family → configurations of the parts beside the decoder."""


def tiny_model(model_type: str) -> nn.Module:
    """Return a tiny model with random weights. transformers must support the model family.

    The model has two or three blocks. It is in float32 and in evaluation mode.
    """
    import torch
    import transformers
    from transformers.models.auto import modeling_auto

    config = config_of(model_type)
    seeing_names = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    names = seeing_names if model_type in _BESIDE else modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    model: Any = getattr(transformers, names[model_type])._from_config(config, dtype=torch.float32).eval()
    model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * 0.15 + float(parameter.ndim == 1))
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):  # the experts of each token, chosen by the token id
                table.copy_((torch.arange(len(table))[:, None] + torch.arange(table.shape[1])) % EXPERTS)
    tiny: nn.Module = model
    return tiny


def config_of(model_type: str) -> Any:
    """Return the transformers configuration of the tiny model of a family."""
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **sizes_of(model_type))


def sizes_of(model_type: str) -> dict[str, Any]:
    """Return the arguments for the configuration of the tiny model of a family."""
    from transformers import AutoConfig

    text = AutoConfig.for_model(model_type).get_text_config()
    known = {*text.to_dict(), *text.attribute_map}
    sizes = {name: size for name, size in _SIZES.items() if name in known} | _OWN_SIZES.get(model_type, {})
    if model_type in _BESIDE:
        sizes = {"text_config": sizes, **_BESIDE[model_type]}
    return copy.deepcopy(sizes)  # configurations change their arguments
