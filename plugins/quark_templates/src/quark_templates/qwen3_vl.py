"""Qwen3-VL, dense: Qwen3's decoder behind a vision tower."""

from __future__ import annotations

from quark.config.architecture import Architecture

QWEN3_VL = Architecture(
    model_type="qwen3_vl",
    decoder_blocks="model.language_model.layers",
    embeddings="model.language_model.embed_tokens",
    final_norm="model.language_model.norm",
    head="lm_head",
    attention_inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_output="self_attn.o_proj",
    attention_norm="input_layernorm",
    attention_value="self_attn.v_proj",
    mlp_inputs=("mlp.gate_proj", "mlp.up_proj"),
    mlp_output="mlp.down_proj",
    mlp_norm="post_attention_layernorm",
    mlp_value="mlp.up_proj",
    inserted_embeddings=("model.visual.merger.linear_fc2", "model.visual.deepstack_merger_list.*.linear_fc2"),
    kv_layers_name=("*k_proj", "*v_proj"),
    q_layer_name="*q_proj",
    exclude_layers_name=("lm_head", "*.visual.*"),
    fused=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
)
