"""Command R: attention and MLP side by side, both fed by one LayerNorm without a bias; embeddings tied to the head."""

from __future__ import annotations

from quark.config.architecture import Architecture

COHERE = Architecture(
    model_type="cohere",
    decoder_blocks="model.layers",
    embeddings="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    attention_inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_output="self_attn.o_proj",
    attention_norm="input_layernorm",
    attention_value="self_attn.v_proj",
    mlp_inputs=("mlp.gate_proj", "mlp.up_proj"),
    mlp_output="mlp.down_proj",
    mlp_norm="input_layernorm",
    mlp_value="mlp.up_proj",
    norm_subtracts_mean=True,
    kv_layers_name=("*k_proj", "*v_proj"),
    q_layer_name="*q_proj",
    exclude_layers_name="lm_head",
    fused=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
    algorithm_defaults={"smoothquant": {"alpha": 0.5}},
)
