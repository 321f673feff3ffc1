"""GPT-2: query, key and value one after another in one matrix; an ungated MLP; weights kept input first, as ``Conv1D`` does."""

from __future__ import annotations

from quark.config.architecture import Architecture

GPT2 = Architecture(
    model_type="gpt2",
    decoder_blocks="transformer.h",
    embeddings="transformer.wte",
    final_norm="transformer.ln_f",
    head="lm_head",
    attention_inputs="attn.c_attn",
    attention_output="attn.c_proj",
    attention_norm="ln_1",
    attention_value="attn.c_attn",
    attention_value_rows="last",
    mlp_inputs="mlp.c_fc",
    mlp_output="mlp.c_proj",
    mlp_norm="ln_2",
    norm_subtracts_mean=True,
    position_embeddings="transformer.wpe",
    kv_layers_name="*c_attn",
    q_layer_name="*c_attn",
    exclude_layers_name="lm_head",
)
