"""Qwen, the first: query, key and value in one matrix with biases; the gate of the MLP is its second matrix.

Its code comes with the checkpoints: verified on a module skeleton, after that code's names and forward pass.
"""

from __future__ import annotations

from quark.config.architecture import Architecture

QWEN = Architecture(
    model_type="qwen",
    decoder_blocks="transformer.h",
    embeddings="transformer.wte",
    final_norm="transformer.ln_f",
    head="lm_head",
    attention_inputs="attn.c_attn",
    attention_output="attn.c_proj",
    attention_norm="ln_1",
    attention_value="attn.c_attn",
    attention_value_rows="last",
    mlp_inputs=("mlp.w1", "mlp.w2"),
    mlp_output="mlp.c_proj",
    mlp_norm="ln_2",
    mlp_value="mlp.w1",
    kv_layers_name="*c_attn",
    q_layer_name="*c_attn",
    exclude_layers_name="lm_head",
    fused=(("w2", "w1"),),
)
