"""OPT: LayerNorm with biases, learned positions, an ungated MLP that lies directly in the block."""

from __future__ import annotations

from quark.config.architecture import Architecture

OPT = Architecture(
    model_type="opt",
    decoder_blocks="model.decoder.layers",
    embeddings="model.decoder.embed_tokens",
    final_norm="model.decoder.final_layer_norm",
    head="lm_head",
    attention_inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_output="self_attn.out_proj",
    attention_norm="self_attn_layer_norm",
    attention_value="self_attn.v_proj",
    mlp_inputs="fc1",
    mlp_output="fc2",
    mlp_norm="final_layer_norm",
    mlp_value="fc1",
    norm_subtracts_mean=True,
    position_embeddings="model.decoder.embed_positions",
    kv_layers_name=("*k_proj", "*v_proj"),
    q_layer_name="*q_proj",
    exclude_layers_name="lm_head",
    fused=(("q_proj", "k_proj", "v_proj"),),
)
