"""LFM2: blocks of attention or of a short gated convolution, whose projections stay float; the MLP is ``w2(silu(w1(x)) * w3(x))``."""

from __future__ import annotations

from quark.config.architecture import Architecture

LFM2 = Architecture(
    model_type="lfm2",
    decoder_blocks="model.layers",
    embeddings="model.embed_tokens",
    final_norm="model.embedding_norm",
    head="lm_head",
    attention_inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_output="self_attn.out_proj",
    attention_norm="operator_norm",
    attention_value="self_attn.v_proj",
    mixer=("conv.in_proj", "conv.out_proj"),
    mlp_inputs=("feed_forward.w1", "feed_forward.w3"),
    mlp_output="feed_forward.w2",
    mlp_norm="ffn_norm",
    mlp_value="feed_forward.w3",
    kv_layers_name=("*self_attn.k_proj", "*self_attn.v_proj"),
    q_layer_name="*self_attn.q_proj",
    exclude_layers_name=("lm_head", "*conv.in_proj", "*conv.out_proj"),
    fused=(("q_proj", "k_proj", "v_proj"), ("w1", "w3")),
)
