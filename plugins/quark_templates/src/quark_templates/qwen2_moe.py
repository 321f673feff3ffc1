"""Qwen2-MoE: a mixture of experts beside one shared expert, which has a gate of its own."""

from __future__ import annotations

from quark.config.architecture import Architecture

QWEN2_MOE = Architecture(
    model_type="qwen2_moe",
    decoder_blocks="model.layers",
    embeddings="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    attention_inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_output="self_attn.o_proj",
    attention_norm="input_layernorm",
    attention_value="self_attn.v_proj",
    mlp_norm="post_attention_layernorm",
    experts="mlp.experts",
    router="mlp.gate",
    shared_experts=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"),
    shared_expert_value="mlp.shared_expert.up_proj",
    shared_expert_gate="mlp.shared_expert_gate",
    kv_layers_name=("*k_proj", "*v_proj"),
    q_layer_name="*q_proj",
    exclude_layers_name=("lm_head", "*.gate", "*.gate.linear", "*.shared_expert_gate"),
    fused=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
)
