"""Mistral: Llama's block with sliding-window attention."""

from __future__ import annotations

import attrs

from quark_templates.bases import BEHIND_VISION_TOWER, LLAMA_LIKE, MIXTURE

MISTRAL = attrs.evolve(LLAMA_LIKE, model_type="mistral")
MINISTRAL = attrs.evolve(LLAMA_LIKE, model_type="ministral")  # some blocks have no sliding window
MINISTRAL3 = attrs.evolve(LLAMA_LIKE, model_type="ministral3")  # queries are scaled by their position

MIXTRAL = attrs.evolve(
    MIXTURE,
    model_type="mixtral",
    exclude_layers_name=("lm_head", "*.gate", "*.gate.linear"),
    algorithm_defaults={"smoothquant": {"alpha": 0.8}, "autosmoothquant": {"compute_scale_loss": "MAE"}},
)

MISTRAL3 = attrs.evolve(
    LLAMA_LIKE, **BEHIND_VISION_TOWER, model_type="mistral3", inserted_embeddings="model.multi_modal_projector.linear_2"
)
