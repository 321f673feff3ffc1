"""MiniMax: mixtures whose AMD Quark patterns name the experts as MiniMax's own code does, not as transformers does."""

from __future__ import annotations

import attrs

from quark_templates.bases import BEHIND_VISION_TOWER, MIXTURE

__all__ = ["MINIMAX_M2", "MINIMAX_M3_VL"]

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
    # In blocks with an indexer that reads the normed input as well, attention_inputs are not all that the
    # norm feeds.
    attention_norm=None,
    mlp_inputs="mlp.gate_up_proj",
    mlp_output="mlp.down_proj",
    expert_value=None,
    shared_experts=("mlp.shared_experts.gate_up_proj", "mlp.shared_experts.down_proj"),
    norm_has_unit_offset=True,
    inserted_embeddings="model.multi_modal_projector.merge_linear_2",
)
