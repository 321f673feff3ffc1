"""Templates of Gemma and Muse. Their decoder blocks are like Llama's blocks, but they have other norms.

Up to Gemma 3, norms multiply by 1 + weight. Since Gemma 2, blocks have a norm before and a norm after both
attention and MLP.
"""

from __future__ import annotations

import attrs

from quark.config.architecture import FUSED_EXPERTS
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

# One model of text, images and sound, without towers. Values pass a norm without a weight, so that no scale
# can be moved through them; blocks of full attention may take their keys for values too, and later blocks the
# keys and values of earlier ones.
GEMMA4_UNIFIED = attrs.evolve(
    GEMMA3,
    model_type="gemma4_unified",
    attention_value=None,
    norm_has_unit_offset=False,
    inserted_embeddings=("model.embed_vision.multimodal_embedder.embedding_projection", "model.embed_audio.embedding_projection"),
    exclude_layers_name=("*embed_vision*", "*vision_embedder*", "*embed_audio*", "*lm_head"),
)

# In mixtures, routed experts and a dense MLP run side by side in every block; the small models add embeddings
# of their own to each block.
GEMMA4 = attrs.evolve(
    GEMMA4_UNIFIED,
    model_type="gemma4",
    experts="experts",
    experts_norm="pre_feedforward_layernorm_2",
    router="router.proj",
    inserted_embeddings=("model.embed_vision.embedding_projection", "model.embed_audio.embedding_projection"),
    exclude_layers_name=(
        "*vision_tower*",
        "*embed_vision*",
        "*audio_tower*",
        "*embed_audio*",
        "*multi_modal_projector*",
        "*lm_head",
        "*router.proj",
    ),
    weight_converters=FUSED_EXPERTS,
)


# Muse: Gemma's norms before and after attention and MLP, and a gate on the output of attention.
#
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
    unsupported={"rotation.r2": "a gate scales single channels of the values"},
)
