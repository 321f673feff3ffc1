"""ERNIE 4.5: Llama's block with rotary positions pair by pair, and a mixture of DeepSeek-MoE's form."""

from __future__ import annotations

import attrs

from quark_templates.bases import DEEPSEEK_MOE_LIKE, LLAMA_LIKE

ERNIE4_5 = attrs.evolve(LLAMA_LIKE, model_type="ernie4_5")
ERNIE4_5_MOE = attrs.evolve(DEEPSEEK_MOE_LIKE, model_type="ernie4_5_moe", exclude_layers_name=("lm_head", "*mlp.gate"))
