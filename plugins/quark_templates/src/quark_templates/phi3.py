"""Phi-3 and Phi-4: Llama's block with query, key and value in one matrix, and gate and up in another."""

from __future__ import annotations

from quark.config.architecture import Architecture

PHI3 = Architecture(
    model_type="phi3",
    decoder_blocks="model.layers",
    embeddings="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    attention_inputs="self_attn.qkv_proj",
    attention_output="self_attn.o_proj",
    attention_norm="input_layernorm",
    attention_value="self_attn.qkv_proj",
    attention_value_rows="last",
    mlp_inputs="mlp.gate_up_proj",
    mlp_output="mlp.down_proj",
    mlp_norm="post_attention_layernorm",
    mlp_value="mlp.gate_up_proj",
    mlp_value_rows="last",
    kv_layers_name="*qkv_proj",
    q_layer_name="*qkv_proj",
    exclude_layers_name="lm_head",
)
