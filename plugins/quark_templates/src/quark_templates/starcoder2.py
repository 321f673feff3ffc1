"""StarCoder2: LayerNorm and projections with biases, an ungated MLP; embeddings tied to the head."""

from __future__ import annotations

from quark.config.architecture import Architecture

STARCODER2 = Architecture(
    model_type="starcoder2",
    decoder_blocks="model.layers",
    embeddings="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    attention_inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_output="self_attn.o_proj",
    attention_norm="input_layernorm",
    attention_value="self_attn.v_proj",
    mlp_inputs="mlp.c_fc",
    mlp_output="mlp.c_proj",
    mlp_norm="post_attention_layernorm",
    norm_subtracts_mean=True,
    kv_layers_name=("*k_proj", "*v_proj"),
    q_layer_name="*q_proj",
    exclude_layers_name="lm_head",
    fused=(("q_proj", "k_proj", "v_proj"),),
)
