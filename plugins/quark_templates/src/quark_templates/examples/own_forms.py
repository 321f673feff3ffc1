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
SIDE_BY_SIDE: dict[str, Any] = {
    "intermediate_size": 64,
    "layer_types": ["sliding_attention", "full_attention"],
    "global_head_dim": 16,
    "sliding_window": 32,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": EXPERTS,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
POOLED_SIGHT: dict[str, Any] = {**SIGHT, "num_key_value_heads": 2, "head_dim": 16, "pooling_kernel_size": 2, "position_embedding_size": 8}
SOUND: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [4, 4],
    "output_proj_dims": 32,
}
DELTA_FIRST: dict[str, Any] = {
    **LATENT,
    "qk_rope_head_dim": 0,
    "layer_types": ["linear_attention", "indexed_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "indexer_types": ["full", "full"],
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    "index_kpool": 2,
    "hc_mult": 2,
}
LAYERED_SIGHT: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
}
RUNS_OF_TOKENS: dict[str, Any] = {
    "layer_types": ["linear_attention", "indexed_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": EXPERTS,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
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
    "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
}
SIZES: dict[str, dict[str, Any]] = {
    "dbrx": STACKED,
    "deepseek_v4": {**TEXT, **STREAMS},
    "gemma4": {"text_config": {**TEXT, **SIDE_BY_SIDE}, "vision_config": POOLED_SIGHT, "audio_config": SOUND, "tie_word_embeddings": False},
    "glm5_next": {"text_config": {**TEXT, **DELTA_FIRST}, "vision_config": {**LAYERED_SIGHT, "projection_intermediate_size": 32}},
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
    "qwen4_exp": {"text_config": {**TEXT, **RUNS_OF_TOKENS}, "vision_config": {**LAYERED_SIGHT, "num_position_embeddings": 16}},
    "qwen4_exp_text": {**TEXT, **RUNS_OF_TOKENS},
}
