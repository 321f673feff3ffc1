"""GLM-5: DeepSeek-V3.2's form, with exclusions of its own."""

from __future__ import annotations

from quark.config.architecture import Architecture

GLM_MOE_DSA = Architecture(
    model_type="glm_moe_dsa",
    decoder_blocks="model.layers",
    embeddings="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    attention_inputs=("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.indexer.wk", "self_attn.indexer.weights_proj"),
    attention_inner=("self_attn.q_b_proj", "self_attn.kv_b_proj", "self_attn.indexer.wq_b"),
    attention_output="self_attn.o_proj",
    attention_norm="input_layernorm",
    attention_inner_norms=(
        ("self_attn.q_a_layernorm", ("self_attn.q_b_proj", "self_attn.indexer.wq_b")),
        ("self_attn.kv_a_layernorm", ("self_attn.kv_b_proj",)),
    ),
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
    exclude_layers_name=("*self_attn*", "*mlp.gate", "*lm_head", "*mlp.gate_proj", "*mlp.up_proj", "*mlp.down_proj"),
    fused=(("gate_proj", "up_proj"),),
)
