"""GLM-4.1V: GLM-4-0414's decoder, with norms before and after each part and gate and up in one matrix, behind a vision tower."""

from __future__ import annotations

from quark.config.architecture import Architecture

GLM4V = Architecture(
    model_type="glm4v",
    decoder_blocks="model.language_model.layers",
    embeddings="model.language_model.embed_tokens",
    final_norm="model.language_model.norm",
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
    inserted_embeddings="model.visual.merger.down_proj",
    mlp_output_norm="post_mlp_layernorm",
    kv_layers_name=("*k_proj", "*v_proj"),
    q_layer_name="*q_proj",
    exclude_layers_name=("lm_head", "*.visual.*"),
    fused=(("q_proj", "k_proj", "v_proj"),),
)
