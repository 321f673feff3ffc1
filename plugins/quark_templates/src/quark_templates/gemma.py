"""Gemma: Llama's block with norms that multiply by 1 + weight, from Gemma 2 on with a norm before and after attention and MLP."""

from __future__ import annotations

import attrs

from quark_templates.bases import BEHIND_VISION_TOWER, GEMMA_LIKE

GEMMA = attrs.evolve(GEMMA_LIKE, model_type="gemma")

GEMMA2 = attrs.evolve(
    GEMMA_LIKE,
    model_type="gemma2",
    attention_output_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
)

GEMMA3_TEXT = attrs.evolve(GEMMA2, model_type="gemma3_text", key_norms="self_attn.k_norm", exclude_layers_name="*lm_head")

GEMMA3 = attrs.evolve(GEMMA3_TEXT, **BEHIND_VISION_TOWER, model_type="gemma3")
