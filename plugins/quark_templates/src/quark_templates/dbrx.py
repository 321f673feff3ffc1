"""DBRX: one clipped matrix for queries, keys and values, and a mixture in every block whose experts' matrices are stacked.

Separate experts are layers such as ``ffn.experts.3.w1``. vLLM reads the stacked float matrices of published
checkpoints only.
"""

from __future__ import annotations

import attrs

from quark_templates.bases import MIXTURE

__all__ = ["DBRX"]

DBRX = attrs.evolve(
    MIXTURE,
    model_type="dbrx",
    decoder_blocks="transformer.blocks",
    embeddings="transformer.wte",
    final_norm="transformer.norm_f",
    attention_inputs="norm_attn_norm.attn.Wqkv",
    attention_output="norm_attn_norm.attn.out_proj",
    query_projections=(),
    key_projections=(),
    value_projections=(),
    attention_norm="norm_attn_norm.norm_1",
    attention_value=None,  # queries, keys and values are clipped, so a scale does not pass
    mlp_norm="norm_attn_norm.norm_2",
    experts="ffn.experts",
    expert_parts="quark_templates.fused_experts:stacked_experts",
    expert_inputs=("w1", "v1"),
    expert_output="w2",
    expert_value="v1",
    router="ffn.router.layer",
    norm_subtracts_mean=True,
    kv_layers_name="*Wqkv",
    q_layer_name="*Wqkv",
    gate_up_layers_name=("w1", "v1"),
    exclude_layers_name=("lm_head", "*router.layer"),
    fused=(("w1", "v1"),),
)
