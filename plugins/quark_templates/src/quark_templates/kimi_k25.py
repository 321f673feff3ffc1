"""Kimi-K2.5 and K2.6: DeepSeek-V3's decoder behind a vision tower. Templates quantize the routed experts alone.

Published checkpoints name the decoder ``language_model.model``, transformers ``model.language_model``; the patterns fit both.
"""

from __future__ import annotations

import attrs

from quark.config.architecture import Architecture
from quark_templates.deepseek_v3 import DEEPSEEK_V3

KIMI_K25: Architecture = attrs.evolve(
    DEEPSEEK_V3,
    model_type="kimi_k25",
    decoder_blocks="model.language_model.layers",
    embeddings="model.language_model.embed_tokens",
    final_norm="model.language_model.norm",
    inserted_embeddings="model.mm_projector.out_proj",
    kv_layers_name=("*kv_a_proj_with_mqa", "*kv_b_proj"),
    q_layer_name="*q_a_proj",
    exclude_layers_name=(
        "*self_attn*",
        "*mlp.gate",
        "*mlp.gate.linear",
        "*lm_head",
        "*mlp.gate_proj",
        "*mlp.up_proj",
        "*mlp.down_proj",
        "*shared_experts*",
        "*mm_projector*",
        "*vision_tower*",
    ),
    algorithm_defaults={},
)
