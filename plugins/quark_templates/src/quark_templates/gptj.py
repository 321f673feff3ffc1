"""GPT-J: attention and an ungated MLP side by side, both fed by one LayerNorm; biases in the MLP and in the head."""

from __future__ import annotations

from quark.config.architecture import Architecture

GPTJ = Architecture(
    model_type="gptj",
    decoder_blocks="transformer.h",
    embeddings="transformer.wte",
    final_norm="transformer.ln_f",
    head="lm_head",
    attention_inputs=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    attention_output="attn.out_proj",
    attention_norm="ln_1",
    attention_value="attn.v_proj",
    mlp_inputs="mlp.fc_in",
    mlp_output="mlp.fc_out",
    mlp_norm="ln_1",
    norm_subtracts_mean=True,
    kv_layers_name=("*k_proj", "*v_proj"),
    q_layer_name="*q_proj",
    exclude_layers_name="lm_head",
    fused=(("q_proj", "k_proj", "v_proj"),),
)
