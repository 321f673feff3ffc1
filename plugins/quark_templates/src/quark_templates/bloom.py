"""BLOOM: query, key and value in one matrix, head by head; ALiBi in place of positions; an ungated MLP; biases in every block."""

from __future__ import annotations

from quark.config.architecture import Architecture

BLOOM = Architecture(
    model_type="bloom",
    decoder_blocks="transformer.h",
    embeddings="transformer.word_embeddings",
    final_norm="transformer.ln_f",
    head="lm_head",
    attention_inputs="self_attention.query_key_value",
    attention_output="self_attention.dense",
    attention_norm="input_layernorm",
    attention_value="self_attention.query_key_value",
    attention_value_rows="last_of_each_head",
    mlp_inputs="mlp.dense_h_to_4h",
    mlp_output="mlp.dense_4h_to_h",
    mlp_norm="post_attention_layernorm",
    norm_subtracts_mean=True,
    embedding_norm="transformer.word_embeddings_layernorm",
    kv_layers_name="*query_key_value",
    q_layer_name="*query_key_value",
    exclude_layers_name="lm_head",
)
