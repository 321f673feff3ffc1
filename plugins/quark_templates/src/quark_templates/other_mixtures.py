"""Templates of mixture-of-experts models with unusual names: DBRX, Grok-1 and MiniMax."""

from __future__ import annotations

import attrs

from quark_templates.bases import BEHIND_VISION_TOWER, MIXTURE, QKV

# DBRX: one clipped matrix for queries, keys and values, and experts whose matrices are stacked. Separate
# experts are layers such as ``ffn.experts.3.w1``. vLLM reads the stacked float matrices of published
# checkpoints only.
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
    attention_value=None,  # queries, keys and values are clipped, so no scale can be moved through them
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


# Grok-1: attention and a mixture of experts in every block, each between two norms. Its code comes with the
# checkpoints in Hugging Face form: verified on a module skeleton, after that code's names and vLLM's
# implementation.
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


# MiniMax: AMD Quark's patterns name the experts as MiniMax's own code does, not as transformers does.
MINIMAX_M2 = attrs.evolve(
    MIXTURE,
    model_type="minimax_m2",
    key_norms="self_attn.k_norm",
    gate_up_layers_name=("w1", "w3"),
    exclude_layers_name=("lm_head", "*block_sparse_moe.gate*", "*self_attn*"),
)

# Some blocks attend to blocks of keys that an indexer chooses, some have a dense MLP. Gate and up of dense
# MLPs and shared experts are one matrix in transformers, two in published checkpoints; those of experts are
# two in both. AMD Quark's patterns name the mixture as checkpoints do, block_sparse_moe, and the layers that
# merge patches patch_merge_mlp. In transformers that router is no linear layer and the merging a part of the
# projector, so both stay float; the facts were checked there.
MINIMAX_M3_VL = attrs.evolve(
    MIXTURE,
    **BEHIND_VISION_TOWER
    | {
        "exclude_layers_name": (
            "*lm_head",
            "*vision_tower*",
            "*multi_modal_projector*",
            "*patch_merge_mlp*",
            "*block_sparse_moe.gate",
            "*self_attn*",
        )
    },
    model_type="minimax_m3_vl",
    key_norms="self_attn.k_norm",
    # In some blocks an indexer also reads the output of the norm, so attention_inputs are not all layers that
    # the norm feeds.
    attention_norm=None,
    mlp_inputs="mlp.gate_up_proj",
    mlp_output="mlp.down_proj",
    expert_value=None,
    shared_experts=("mlp.shared_experts.gate_up_proj", "mlp.shared_experts.down_proj"),
    norm_has_unit_offset=True,
    inserted_embeddings="model.multi_modal_projector.merge_linear_2",
)
