"""Grok-1: attention and a mixture of experts in every block, each between two norms.

Its code comes with the checkpoints in Hugging Face form: verified on a module skeleton, after that code's
names and vLLM's implementation.
"""

from __future__ import annotations

import attrs

from quark_templates.bases import MIXTURE, QKV

__all__ = ["GROK_1"]

GROK_1 = attrs.evolve(
    MIXTURE,
    model_type="grok-1",
    attention_inputs=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    attention_output="attn.o_proj",
    query_projections="attn.q_proj",
    key_projections="attn.k_proj",
    value_projections="attn.v_proj",
    attention_norm="pre_attn_norm",
    attention_value="attn.v_proj",
    attention_output_norm="post_attn_norm",
    mlp_norm="pre_moe_norm",
    mlp_output_norm="post_moe_norm",
    experts="moe_block.experts",
    router="moe_block.gate",
    expert_inputs=("linear", "linear_v"),
    expert_output="linear_1",
    expert_value="linear_v",
    gate_up_layers_name=("linear", "linear_v"),
    exclude_layers_name=("lm_head", "*.gate", "*.gate.linear"),
    fused=(QKV, ("linear", "linear_v")),
)
