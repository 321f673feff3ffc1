"""Muse: Gemma's norms before and after attention and MLP, and a gate on the output of attention."""

from __future__ import annotations

import attrs

from quark_templates.bases import BEHIND_VISION_TOWER, GEMMA_LIKE

__all__ = ["MUSE_GLIMMER"]

# The norms of its blocks multiply by 1 + weight, the final norm by its weight. Queries and keys pass one norm
# without a weight.
MUSE_GLIMMER = attrs.evolve(
    GEMMA_LIKE,
    **BEHIND_VISION_TOWER | {"exclude_layers_name": ("*vision_tower*", "*vision_adapter*", "*vision_projection*", "lm_head")},
    model_type="muse_glimmer",
    attention_inputs=(*GEMMA_LIKE.attention_inputs, "self_attn.gate_proj"),
    key_norms="self_attn.qk_norm",
    attention_output_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
    inserted_embeddings="model.vision_projection",
    unsupported={"rotation.r2": "a gate multiplies single channels of the values"},
)
