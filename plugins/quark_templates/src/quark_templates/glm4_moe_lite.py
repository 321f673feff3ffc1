"""GLM-4.7-Flash: DeepSeek's low-rank attention; the first block dense, the others mixtures with shared experts."""

from __future__ import annotations

from quark.config.architecture import Architecture

GLM4_MOE_LITE = Architecture(
    model_type="glm4_moe_lite",
    decoder_blocks="model.layers",
    embeddings="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    attention_inputs=("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    attention_inner=("self_attn.q_b_proj", "self_attn.kv_b_proj"),
    attention_output="self_attn.o_proj",
    attention_norm="input_layernorm",
    attention_inner_norms=(("self_attn.q_a_layernorm", ("self_attn.q_b_proj",)), ("self_attn.kv_a_layernorm", ("self_attn.kv_b_proj",))),
    attention_value="self_attn.kv_b_proj",
    attention_value_rows="last_of_each_head",
    mlp_inputs=("mlp.gate_proj", "mlp.up_proj"),
    mlp_output="mlp.down_proj",
    mlp_norm="post_attention_layernorm",
    mlp_value="mlp.up_proj",
    experts="mlp.experts",
    router="mlp.gate",
    shared_experts=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"),
    shared_expert_value="mlp.shared_experts.up_proj",
    kv_layers_name=("*kv_a_proj_with_mqa", "*kv_b_proj"),
    q_layer_name="*q_a_proj",
    exclude_layers_name=("lm_head", "*self_attn*", "*mlp.gate"),
    fused=(("gate_proj", "up_proj"),),
)
