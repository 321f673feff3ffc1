"""Sizes of tiny mixtures of experts."""

from __future__ import annotations

from typing import Any

__all__ = ["EXPERTS", "GROUPED", "OWN_SIZES", "SIZES"]

EXPERTS = 4
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "rope_parameters": ROPE,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8}
ROUTED: dict[str, Any] = {"n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
LOW_RANK: dict[str, Any] = {
    **ROUTED,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
INDEXED: dict[str, Any] = {**LOW_RANK, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {**GROUPED, "num_local_experts": EXPERTS},
    "qwen2_moe": {**GROUPED, "num_experts": EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**GROUPED, "num_experts": EXPERTS},
    "olmoe": {**GROUPED, "num_experts": EXPERTS},
    "gpt_oss": {**GROUPED, "num_local_experts": EXPERTS},
    "deepseek_v2": {**LOW_RANK, "topk_method": "greedy"},
    "deepseek_v3": LOW_RANK,
    "deepseek_v32": INDEXED,
    "dots1": {**GROUPED, **ROUTED},
    "ernie4_5_moe": {**GROUPED, "moe_k": 2, "moe_num_experts": EXPERTS, "moe_num_shared_experts": 1},
    "glm4_moe": {**GROUPED, **ROUTED},
    "glm4_moe_lite": {**LOW_RANK, "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}},
    "glm_moe_dsa": INDEXED,
    "granitemoehybrid": {
        "num_key_value_heads": 2,
        "num_local_experts": EXPERTS,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
    },
    "minimax_m2": {**GROUPED, "num_local_experts": EXPERTS},
    "phimoe": {**GROUPED, "num_local_experts": EXPERTS},
    "qwen3_next": {
        **GROUPED,
        "num_experts": EXPERTS,
        "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}
