"""Qwen3.5, mixtures: Qwen3.5's blocks with experts and a gated shared one, behind a vision tower, and without one."""

from __future__ import annotations

import attrs

from quark.config.architecture import FUSED_EXPERTS, Architecture

QWEN3_5_MOE = Architecture(
    model_type="qwen3_5_moe",
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
    mlp_norm="post_attention_layernorm",
    experts="mlp.experts",
    router="mlp.gate",
    shared_experts=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"),
    shared_expert_value="mlp.shared_expert.up_proj",
    shared_expert_gate="mlp.shared_expert_gate",
    norm_has_unit_offset=True,
    inserted_embeddings="model.visual.merger.linear_fc2",
    kv_layers_name=("*k_proj", "*v_proj"),
    q_layer_name="*q_proj",
    exclude_layers_name=(
        "lm_head",
        "model.visual.*",
        "mtp.*",
        "*mlp.gate",
        "*mlp.gate.linear",
        "*shared_expert_gate*",
        "*.linear_attn.*",
        "*.self_attn.*",
        "*.shared_expert.*",
    ),
    fused=(
        ("q_proj", "k_proj", "v_proj"),
        ("gate_proj", "up_proj"),
        ("in_proj_qkv", "in_proj_z"),
        ("in_proj_b", "in_proj_a"),
    ),
    weight_converters=FUSED_EXPERTS,
    algorithm_defaults={"smoothquant": {"alpha": 0.5}, "autosmoothquant": {"compute_scale_loss": "MAE"}},
)

QWEN3_5_MOE_TEXT = attrs.evolve(
    QWEN3_5_MOE,
    model_type="qwen3_5_moe_text",
    decoder_blocks="model.layers",
    embeddings="model.embed_tokens",
    final_norm="model.norm",
    inserted_embeddings=(),
    exclude_layers_name=tuple(p for p in QWEN3_5_MOE.exclude_layers_name if p != "model.visual.*"),
)
