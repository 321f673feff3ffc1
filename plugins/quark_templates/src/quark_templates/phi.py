"""Phi: parallel attention and MLP in Phi-1 and Phi-2, Llama's block with fused projections in Phi-3, a mixture in Phi-3.5-MoE."""

from __future__ import annotations

import attrs

from quark_templates.bases import LLAMA_LIKE, MIXTURE, QKV

# One LayerNorm feeds attention and MLP; biases throughout.
PHI = attrs.evolve(
    LLAMA_LIKE,
    model_type="phi",
    final_norm="model.final_layernorm",
    attention_output="self_attn.dense",
    key_norms="self_attn.k_layernorm",  # with qk_layernorm
    mlp_inputs="mlp.fc1",
    mlp_output="mlp.fc2",
    mlp_norm="input_layernorm",
    mlp_value=None,
    norm_subtracts_mean=True,
    fused=(QKV,),
)

PHI3 = attrs.evolve(
    LLAMA_LIKE,
    model_type="phi3",
    attention_inputs="self_attn.qkv_proj",
    query_projections=(),
    key_projections=(),
    value_projections=(),
    attention_value="self_attn.qkv_proj",
    attention_value_rows="last",
    mlp_inputs="mlp.gate_up_proj",
    mlp_value="mlp.gate_up_proj",
    mlp_value_rows="last",
    kv_layers_name="*qkv_proj",
    q_layer_name="*qkv_proj",
    fused=(),
)

# LayerNorm; biases throughout.
PHIMOE = attrs.evolve(
    MIXTURE, model_type="phimoe", router="mlp.router", norm_subtracts_mean=True, exclude_layers_name=("lm_head", "*router")
)
