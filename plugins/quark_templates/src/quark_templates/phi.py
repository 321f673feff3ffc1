"""Phi-1, Phi-1.5 and Phi-2: attention and an ungated MLP side by side, both fed by one LayerNorm; biases throughout."""

from __future__ import annotations

from quark.config.architecture import Architecture

PHI = Architecture(
    model_type="phi",
    decoder_blocks="model.layers",
    embeddings="model.embed_tokens",
    final_norm="model.final_layernorm",
    head="lm_head",
    attention_inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_output="self_attn.dense",
    attention_norm="input_layernorm",
    attention_value="self_attn.v_proj",
    mlp_inputs="mlp.fc1",
    mlp_output="mlp.fc2",
    mlp_norm="input_layernorm",
    norm_subtracts_mean=True,
    kv_layers_name=("*k_proj", "*v_proj"),
    q_layer_name="*q_proj",
    exclude_layers_name="lm_head",
    fused=(("q_proj", "k_proj", "v_proj"),),
)
