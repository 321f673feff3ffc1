"""GLM-4-0414: norms before and after each part; biases in query, key and value; gate and up in one matrix."""

from __future__ import annotations

from quark.config.architecture import Architecture

GLM4 = Architecture(
    model_type="glm4",
    decoder_blocks="model.layers",
    embeddings="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    attention_inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_output="self_attn.o_proj",
    attention_norm="input_layernorm",
    attention_value="self_attn.v_proj",
    attention_output_norm="post_self_attn_layernorm",
    mlp_inputs="mlp.gate_up_proj",
    mlp_output="mlp.down_proj",
    mlp_norm="post_attention_layernorm",
    mlp_value="mlp.gate_up_proj",
    mlp_value_rows="last",
    mlp_output_norm="post_mlp_layernorm",
    kv_layers_name=("*k_proj", "*v_proj"),
    q_layer_name="*q_proj",
    exclude_layers_name="lm_head",
    fused=(("q_proj", "k_proj", "v_proj"),),
)
