"""Qwen3.5, dense: blocks of linear attention (gated delta net) or gated attention, behind a vision tower, and without one."""

from __future__ import annotations

import attrs

from quark.config.architecture import Architecture

QWEN3_5 = Architecture(
    model_type="qwen3_5",
    decoder_blocks="model.language_model.layers",
    embeddings="model.language_model.embed_tokens",
    final_norm="model.language_model.norm",
    head="lm_head",
    attention_inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_output="self_attn.o_proj",
    attention_norm="input_layernorm",
    attention_value="self_attn.v_proj",
    mixer=(
        "linear_attn.in_proj_qkv",
        "linear_attn.in_proj_z",
        "linear_attn.in_proj_b",
        "linear_attn.in_proj_a",
        "linear_attn.out_proj",
    ),
    mlp_inputs=("mlp.gate_proj", "mlp.up_proj"),
    mlp_output="mlp.down_proj",
    mlp_norm="post_attention_layernorm",
    mlp_value="mlp.up_proj",
    norm_has_unit_offset=True,
    inserted_embeddings="model.visual.merger.linear_fc2",
    kv_layers_name=("*self_attn.k_proj", "*self_attn.v_proj"),
    q_layer_name="*self_attn.q_proj",
    exclude_layers_name=("lm_head", "model.visual.*", "*mtp*"),
    fused=(
        ("q_proj", "k_proj", "v_proj"),
        ("gate_proj", "up_proj"),
        ("in_proj_qkv", "in_proj_z"),
        ("in_proj_b", "in_proj_a"),
    ),
    algorithm_defaults={"smoothquant": {"alpha": 0.5}},
)

QWEN3_5_TEXT = attrs.evolve(
    QWEN3_5,
    model_type="qwen3_5_text",
    decoder_blocks="model.layers",
    embeddings="model.embed_tokens",
    final_norm="model.norm",
    inserted_embeddings=(),
    exclude_layers_name=("lm_head", "*mtp*"),
)
