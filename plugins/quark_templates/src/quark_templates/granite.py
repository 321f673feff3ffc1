"""Granite: Llama's block with multipliers in Granite 3; Mamba-2 or attention before a mixture in Granite 4."""

from __future__ import annotations

import attrs

from quark_templates.bases import LLAMA_LIKE, MIXTURE

GRANITE = attrs.evolve(LLAMA_LIKE, model_type="granite")  # multipliers on embeddings, attention, residuals and logits

# Mixture and shared MLP both have gate and up in one matrix.
GRANITEMOEHYBRID = attrs.evolve(
    MIXTURE,
    model_type="granitemoehybrid",
    mixer=("mamba.in_proj", "mamba.out_proj"),
    experts="block_sparse_moe.experts",
    router="block_sparse_moe.router",
    shared_experts=("shared_mlp.input_linear", "shared_mlp.output_linear"),
    shared_expert_value="shared_mlp.input_linear",
    shared_expert_value_rows="last",
    exclude_layers_name=("lm_head", "*router*"),
    weight_converters=(
        (
            "block_sparse_moe.input_linear.weight",
            ("block_sparse_moe.experts.*.gate_proj.weight", "block_sparse_moe.experts.*.up_proj.weight"),
            (("SplitFusedExperts", 0),),
        ),
        ("block_sparse_moe.output_linear.weight", ("block_sparse_moe.experts.*.down_proj.weight",), (("SplitFusedExperts", 0),)),
    ),
    algorithm_defaults={"smoothquant": {"alpha": 0.8}, "autosmoothquant": {"compute_scale_loss": "MAE"}},
)
