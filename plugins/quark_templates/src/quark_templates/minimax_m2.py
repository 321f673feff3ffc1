"""MiniMax-M2: normed queries and keys, a mixture in every block; documented patterns name the experts as its own code does."""

from __future__ import annotations

from quark.config.architecture import Architecture

MINIMAX_M2 = Architecture(
    model_type="minimax_m2",
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
    router="mlp.gate",
    kv_layers_name=("*k_proj", "*v_proj"),
    q_layer_name="*q_proj",
    gate_up_layers_name=("w1", "w3"),
    exclude_layers_name=("lm_head", "*block_sparse_moe.gate*", "*self_attn*"),
    fused=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
)
