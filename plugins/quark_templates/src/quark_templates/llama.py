"""Llama: RMSNorm, grouped-query attention, gated MLP; no biases. Families by Meta, and those that see with Llama's decoder."""

from __future__ import annotations

import attrs

from quark_templates.bases import BEHIND_VISION_TOWER, LANGUAGE_MODEL, LLAMA_LIKE

__all__ = ["LLAMA", "LLAMA4", "LLAMA4_TEXT", "LLAVA", "MLLAMA"]

LLAMA = attrs.evolve(LLAMA_LIKE, model_type="llama", algorithm_defaults={"autosmoothquant": {"compute_scale_loss": "MAE"}})

LLAVA = attrs.evolve(LLAMA_LIKE, **BEHIND_VISION_TOWER, model_type="llava", inserted_embeddings="model.multi_modal_projector.linear_2")

# Decoder blocks with cross-attention to an image lie among the others; text alone does not pass them. AMD
# Quark's exclusions leave the vision model's layers to be quantized: static scales of these, and of
# cross-attention, need calibration data with images.
MLLAMA = attrs.evolve(
    LLAMA_LIKE,
    **LANGUAGE_MODEL,
    model_type="mllama",
    mixer=("cross_attn.q_proj", "cross_attn.k_proj", "cross_attn.v_proj", "cross_attn.o_proj"),
    mixer_context=("cross_attn.k_proj", "cross_attn.v_proj"),
    query_projections=("self_attn.q_proj", "cross_attn.q_proj"),
    key_projections=("self_attn.k_proj", "cross_attn.k_proj"),
    value_projections=("self_attn.v_proj", "cross_attn.v_proj"),
    key_norms="cross_attn.k_norm",
    kv_layers_name=("*language_model.*k_proj", "*language_model.*v_proj"),
    q_layer_name="*self_attn.q_proj",
    exclude_layers_name=("*lm_head", "*patch_embedding", "multi_modal_projector"),
)

# Rotary and position-free attention in turns; a dense MLP, or one routed and one shared expert for each
# token. transformers calls the experts with tokens sorted by expert and already weighted by the router.
# Separate experts have the names that vLLM reads, "feed_forward.experts.3.gate_proj".
LLAMA4_TEXT = attrs.evolve(
    LLAMA_LIKE,
    model_type="llama4_text",
    key_norms="self_attn.qk_norm",
    mlp_inputs=("feed_forward.gate_proj", "feed_forward.up_proj"),
    mlp_output="feed_forward.down_proj",
    mlp_value="feed_forward.up_proj",
    experts="feed_forward.experts",
    expert_parts="quark_templates.fused_experts:sorted_experts",
    router="feed_forward.router",
    shared_experts=("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj", "feed_forward.shared_expert.down_proj"),
    shared_expert_value="feed_forward.shared_expert.up_proj",
    exclude_layers_name=("*feed_forward.router", "lm_head"),
    weight_converters=(
        (
            "experts.gate_up_proj",
            ("experts.*.gate_proj.weight", "experts.*.up_proj.weight"),
            (("Transpose", 1, 2), ("SplitFusedExperts", 0)),
        ),
        ("experts.down_proj", ("experts.*.down_proj.weight",), (("Transpose", 1, 2), ("SplitFusedExperts", 0))),
    ),
)

LLAMA4 = attrs.evolve(
    LLAMA4_TEXT,
    model_type="llama4",
    decoder_blocks="language_model.model.layers",
    embeddings="language_model.model.embed_tokens",
    final_norm="language_model.model.norm",
    head="language_model.lm_head",
    inserted_embeddings="multi_modal_projector.linear_1",
    kv_layers_name=("*language_model.*.k_proj", "*language_model.*.v_proj"),
    q_layer_name="*language_model.*.q_proj",
    exclude_layers_name=("multi_modal_projector*", "*feed_forward.router", "vision_model*", "*lm_head"),
)
