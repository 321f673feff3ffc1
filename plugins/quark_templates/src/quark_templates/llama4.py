"""Llama 4: rotary and position-free attention by turns, one expert and a shared one for each token, or a dense MLP, behind a vision tower.

transformers calls the experts with tokens that the router has weighed already, sorted by expert. Taken apart they have the names that vLLM
reads one by one, ``feed_forward.experts.3.gate_proj``.
"""

from __future__ import annotations

import attrs

from quark.config.architecture import Architecture

_MATRICES = (("Transpose", 1, 2), ("SplitFusedExperts", 0))

LLAMA4 = Architecture(
    model_type="llama4",
    decoder_blocks="language_model.model.layers",
    embeddings="language_model.model.embed_tokens",
    final_norm="language_model.model.norm",
    head="language_model.lm_head",
    attention_inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_output="self_attn.o_proj",
    attention_norm="input_layernorm",
    attention_value="self_attn.v_proj",
    mlp_inputs=("feed_forward.gate_proj", "feed_forward.up_proj"),
    mlp_output="feed_forward.down_proj",
    mlp_norm="post_attention_layernorm",
    mlp_value="feed_forward.up_proj",
    experts="feed_forward.experts",
    expert_form="sorted",
    router="feed_forward.router",
    shared_experts=("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj", "feed_forward.shared_expert.down_proj"),
    shared_expert_value="feed_forward.shared_expert.up_proj",
    inserted_embeddings="multi_modal_projector.linear_1",
    kv_layers_name=("*language_model.*.k_proj", "*language_model.*.v_proj"),
    q_layer_name="*language_model.*.q_proj",
    exclude_layers_name=("multi_modal_projector*", "*feed_forward.router", "vision_model*", "*lm_head"),
    fused=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
    weight_converters=(
        ("experts.gate_up_proj", ("experts.*.gate_proj.weight", "experts.*.up_proj.weight"), _MATRICES),
        ("experts.down_proj", ("experts.*.down_proj.weight",), _MATRICES),
    ),
)

LLAMA4_TEXT = attrs.evolve(
    LLAMA4,
    model_type="llama4_text",
    decoder_blocks="model.layers",
    embeddings="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    inserted_embeddings=(),
    kv_layers_name=("*k_proj", "*v_proj"),
    q_layer_name="*q_proj",
    exclude_layers_name=("*feed_forward.router", "lm_head"),
)
"""Without vision; no template documents it."""
