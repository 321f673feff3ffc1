"""Qwen3-Next: blocks of linear or gated attention, each with a mixture and a gated shared expert."""

from __future__ import annotations

from quark.config.architecture import Architecture

QWEN3_NEXT = Architecture(
    model_type="qwen3_next",
    decoder_blocks="model.layers",
    embeddings="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    attention_inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_output="self_attn.o_proj",
    attention_norm="input_layernorm",
    attention_value="self_attn.v_proj",
    mixer=("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.out_proj"),
    mlp_norm="post_attention_layernorm",
    experts="mlp.experts",
    router="mlp.gate",
    shared_experts=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"),
    shared_expert_value="mlp.shared_expert.up_proj",
    shared_expert_gate="mlp.shared_expert_gate",
    norm_has_unit_offset=True,
    kv_layers_name="*qkvz",
    q_layer_name="*qkvz",
    exclude_layers_name=(
        "lm_head",
        "mtp.fc",
        "*linear_attn.in_proj_ba",
        "*linear_attn.in_proj_qkvz",
        "*mlp.gate",
        "*mlp.gate.linear",
        "*mlp.shared_expert_gate",
        "*self_attn.k_proj",
        "*self_attn.q_proj",
        "*self_attn.v_proj",
    ),
    fused=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
)
