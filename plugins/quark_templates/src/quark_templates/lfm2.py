"""LFM2: blocks of attention or of a short gated convolution, whose projections stay float; the MLP is ``w2(silu(w1(x)) * w3(x))``."""

from __future__ import annotations

import attrs

from quark_templates.bases import LLAMA_LIKE, QKV

LFM2 = attrs.evolve(
    LLAMA_LIKE,
    model_type="lfm2",
    final_norm="model.embedding_norm",
    attention_output="self_attn.out_proj",
    key_norms="self_attn.k_layernorm",
    attention_norm="operator_norm",
    mixer=("conv.in_proj", "conv.out_proj"),
    mlp_inputs=("feed_forward.w1", "feed_forward.w3"),
    mlp_output="feed_forward.w2",
    mlp_norm="ffn_norm",
    mlp_value="feed_forward.w3",
    kv_layers_name=("*self_attn.k_proj", "*self_attn.v_proj"),
    q_layer_name="*self_attn.q_proj",
    exclude_layers_name=("lm_head", "*conv.in_proj", "*conv.out_proj"),
    fused=(QKV, ("w1", "w3")),
)
