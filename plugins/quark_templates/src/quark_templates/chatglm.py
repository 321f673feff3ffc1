"""ChatGLM2, ChatGLM3 and GLM-4-9B: query, key and value in one matrix, gate and up in another; the head lies inside the transformer.

Its code comes with the checkpoints: verified on a module skeleton, after that code's names and vLLM's implementation.
"""

from __future__ import annotations

from quark.config.architecture import Architecture

CHATGLM = Architecture(
    model_type="chatglm",
    decoder_blocks="transformer.encoder.layers",
    embeddings="transformer.embedding.word_embeddings",
    final_norm="transformer.encoder.final_layernorm",
    head="transformer.output_layer",
    attention_inputs="self_attention.query_key_value",
    attention_output="self_attention.dense",
    attention_norm="input_layernorm",
    attention_value="self_attention.query_key_value",
    attention_value_rows="last",
    mlp_inputs="mlp.dense_h_to_4h",
    mlp_output="mlp.dense_4h_to_h",
    mlp_norm="post_attention_layernorm",
    mlp_value="mlp.dense_h_to_4h",
    mlp_value_rows="last",
    kv_layers_name="*query_key_value",
    q_layer_name="*query_key_value",
    exclude_layers_name="transformer.output_layer",
)
