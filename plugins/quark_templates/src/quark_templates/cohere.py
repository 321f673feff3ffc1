"""Command: attention and MLP side by side, both fed by one LayerNorm without a bias."""

from __future__ import annotations

import attrs

from quark_templates.bases import LLAMA_LIKE

# Sliding windows in most blocks.
COHERE2 = attrs.evolve(LLAMA_LIKE, model_type="cohere2", mlp_norm="input_layernorm", norm_subtracts_mean=True)

COHERE = attrs.evolve(
    COHERE2,
    model_type="cohere",
    key_norms="self_attn.k_norm",  # with use_qk_norm
    algorithm_defaults={"smoothquant": {"alpha": 0.5}},
)
