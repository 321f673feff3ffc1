"""Phi-3.5-MoE: biases everywhere, layer norms, a mixture in every block."""

from __future__ import annotations

from quark.config.architecture import Architecture

PHIMOE = Architecture(
    model_type="phimoe",
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
    router="mlp.router",
    norm_subtracts_mean=True,
    kv_layers_name=("*k_proj", "*v_proj"),
    q_layer_name="*q_proj",
    exclude_layers_name=("lm_head", "*router"),
    fused=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
)
