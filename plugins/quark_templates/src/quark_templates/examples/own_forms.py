"""Sizes of tiny mixtures with forms of their own."""

from __future__ import annotations

from typing import Any

__all__ = ["EXPERTS", "SIZES"]

EXPERTS = 4
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SIGHT: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
TURNS: dict[str, Any] = {
    "intermediate_size": 32,
    "intermediate_size_mlp": 64,
    "num_local_experts": EXPERTS,
    "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 2,
    "attention_chunk_size": 8,
    "rope_parameters": ROPE,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "n_routed_experts": EXPERTS,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "rope_parameters": ROPE,
}
CHOSEN_BLOCKS: dict[str, Any] = {
    "num_local_experts": EXPERTS,
    "intermediate_size": 32,
    "dense_intermediate_size": 64,
    "shared_intermediate_size": 32,
    "rotary_dim": 4,
    "mlp_layer_types": ["dense", "sparse"],
    "layer_types": ["full_attention", "minimax_m3_sparse"],
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
}
STACKED: dict[str, Any] = {
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 64,
    "vocab_size": 64,
    "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 10000.0},
    "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 64, "moe_num_experts": EXPERTS, "moe_top_k": 2},
}
STREAMS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": EXPERTS,
    "q_lora_rank": 32,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "hc_mult": 2,
    "sliding_window": 16,
    "o_groups": 2,
    "o_lora_rank": 32,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 2,
}
SIZES: dict[str, dict[str, Any]] = {
    "dbrx": STACKED,
    "deepseek_v4": {**TEXT, **STREAMS},
    "kimi_k25": {
        "text_config": {**TEXT, **LATENT},
        "vision_config": {**SIGHT, "pos_emb_height": 4, "pos_emb_width": 4},
        "projection_hidden_size": 32,
        "tie_word_embeddings": False,
    },
    "llama4": {
        "text_config": {**TEXT, **TURNS},
        "vision_config": {**SIGHT, "image_size": 16, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    },
    "llama4_text": {**TEXT, **TURNS},
    "minimax_m3_vl": {"text_config": {**TEXT, **CHOSEN_BLOCKS}, "vision_config": {**SIGHT, "image_size": 16}, "projector_hidden_size": 32},
}
