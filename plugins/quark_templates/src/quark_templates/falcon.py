"""Falcon 7B, the form that the default configuration builds: one norm feeds attention and an ungated MLP; one key and value for all heads.

Falcon 40B and 180B (``new_decoder_architecture``) have a norm for each of the two, ``ln_attn`` and ``ln_mlp``; all else is the same.
"""

from __future__ import annotations

from quark.config.architecture import Architecture

FALCON = Architecture(
    model_type="falcon",
    decoder_blocks="transformer.h",
    embeddings="transformer.word_embeddings",
    final_norm="transformer.ln_f",
    head="lm_head",
    attention_inputs="self_attention.query_key_value",
    attention_output="self_attention.dense",
    attention_norm="input_layernorm",
    mlp_inputs="mlp.dense_h_to_4h",
    mlp_output="mlp.dense_4h_to_h",
    mlp_norm="input_layernorm",
    norm_subtracts_mean=True,
    kv_layers_name="*query_key_value",
    q_layer_name="*query_key_value",
    exclude_layers_name="lm_head",
)
