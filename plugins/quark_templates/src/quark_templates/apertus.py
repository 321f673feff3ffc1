"""Apertus: an ungated MLP, norms on queries and keys, and other names of a block's norms."""

from __future__ import annotations

from quark.config.architecture import Architecture

APERTUS = Architecture(
    model_type="apertus",
    decoder_blocks="model.layers",
    embeddings="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    attention_inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_output="self_attn.o_proj",
    attention_norm="attention_layernorm",
    attention_value="self_attn.v_proj",
    mlp_inputs="mlp.up_proj",
    mlp_output="mlp.down_proj",
    mlp_norm="feedforward_layernorm",
    kv_layers_name=("*k_proj", "*v_proj"),
    q_layer_name="*q_proj",
    exclude_layers_name="lm_head",
    fused=(("q_proj", "k_proj", "v_proj"),),
)
