"""Gemma 3, text only: Gemma 2's norms, and one more on each head's queries and keys."""

from __future__ import annotations

from quark.config.architecture import Architecture

GEMMA3_TEXT = Architecture(
    model_type="gemma3_text",
    decoder_blocks="model.layers",
    embeddings="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    attention_inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_output="self_attn.o_proj",
    attention_norm="input_layernorm",
    attention_value="self_attn.v_proj",
    attention_output_norm="post_attention_layernorm",
    mlp_inputs=("mlp.gate_proj", "mlp.up_proj"),
    mlp_output="mlp.down_proj",
    mlp_norm="pre_feedforward_layernorm",
    mlp_value="mlp.up_proj",
    mlp_output_norm="post_feedforward_layernorm",
    norm_has_unit_offset=True,
    kv_layers_name=("*k_proj", "*v_proj"),
    q_layer_name="*q_proj",
    exclude_layers_name="*lm_head",
    fused=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
)
