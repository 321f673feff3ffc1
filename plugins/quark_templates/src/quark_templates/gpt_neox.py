"""GPT-NeoX and Pythia: query, key and value in one matrix, head by head; an ungated MLP with a norm of its own; biases throughout."""

from __future__ import annotations

from quark.config.architecture import Architecture

GPT_NEOX = Architecture(
    model_type="gpt_neox",
    decoder_blocks="gpt_neox.layers",
    embeddings="gpt_neox.embed_in",
    final_norm="gpt_neox.final_layer_norm",
    head="lm_head",
    attention_inputs="attention.query_key_value",
    attention_output="attention.dense",
    attention_norm="input_layernorm",
    attention_value="attention.query_key_value",
    attention_value_rows="last_of_each_head",
    mlp_inputs="mlp.dense_h_to_4h",
    mlp_output="mlp.dense_4h_to_h",
    mlp_norm="post_attention_layernorm",
    norm_subtracts_mean=True,
    kv_layers_name="*query_key_value",
    q_layer_name="*query_key_value",
    exclude_layers_name="lm_head",
)
