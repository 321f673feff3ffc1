"""OLMo: Llama's projections with other norms in each generation."""

from __future__ import annotations

import attrs

from quark_templates.bases import LLAMA_LIKE, MIXTURE, NORMS_AFTER

OLMO = attrs.evolve(LLAMA_LIKE, model_type="olmo", norm_has_weight=False, norm_subtracts_mean=True)
OLMO2 = attrs.evolve(NORMS_AFTER, model_type="olmo2")
OLMO3 = attrs.evolve(NORMS_AFTER, model_type="olmo3")  # sliding windows in most blocks
OLMOE = attrs.evolve(MIXTURE, model_type="olmoe", key_norms="self_attn.k_norm", exclude_layers_name=("lm_head", "*.gate"))
