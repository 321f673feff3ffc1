"""DBRX: queries, keys and values from one matrix, and clipped; a mixture in every block, its experts' matrices one below the other.

Taken apart, experts are layers of their own, ``ffn.experts.3.w1``. vLLM reads the stacked float matrices of published checkpoints only.
"""

from __future__ import annotations

from quark.config.architecture import Architecture

DBRX = Architecture(
    model_type="dbrx",
    decoder_blocks="transformer.blocks",
    embeddings="transformer.wte",
    final_norm="transformer.norm_f",
    head="lm_head",
    attention_inputs="norm_attn_norm.attn.Wqkv",
    attention_output="norm_attn_norm.attn.out_proj",
    attention_norm="norm_attn_norm.norm_1",
    mlp_norm="norm_attn_norm.norm_2",
    experts="ffn.experts",
    expert_form="stacked",
    expert_inputs=("w1", "v1"),
    expert_output="w2",
    expert_value="v1",
    router="ffn.router.layer",
    norm_subtracts_mean=True,
    kv_layers_name=("*Wqkv",),
    q_layer_name="*Wqkv",
    gate_up_layers_name=("w1", "v1"),
    exclude_layers_name=("lm_head", "*router.layer"),
    fused=(("w1", "v1"),),
)
