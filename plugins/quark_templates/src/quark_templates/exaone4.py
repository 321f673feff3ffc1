"""EXAONE 4: norms after attention and after the MLP, and on each head's queries and keys; no norm feeds a projection, so none is named."""

from __future__ import annotations

from quark.config.architecture import Architecture

EXAONE4 = Architecture(
    model_type="exaone4",
    decoder_blocks="model.layers",
    embeddings="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    attention_inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_output="self_attn.o_proj",
    attention_value="self_attn.v_proj",
    attention_output_norm="post_attention_layernorm",
    mlp_inputs=("mlp.gate_proj", "mlp.up_proj"),
    mlp_output="mlp.down_proj",
    mlp_value="mlp.up_proj",
    mlp_output_norm="post_feedforward_layernorm",
    kv_layers_name=("*k_proj", "*v_proj"),
    q_layer_name="*q_proj",
    exclude_layers_name="lm_head",
    fused=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
)
