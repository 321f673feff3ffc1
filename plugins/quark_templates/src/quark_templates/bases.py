"""Bases: common architectures from which templates are made.

A template states only what differs from its base. A base has no model type and is not registered.
"""

from __future__ import annotations

from typing import Any

import attrs

from quark.config.architecture import Architecture

QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")

LLAMA_LIKE = Architecture(
    model_type="",
    decoder_blocks="model.layers",
    embeddings="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    attention_inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_output="self_attn.o_proj",
    query_projections="self_attn.q_proj",
    key_projections="self_attn.k_proj",
    value_projections="self_attn.v_proj",
    key_norms=(),
    attention_norm="input_layernorm",
    attention_value="self_attn.v_proj",
    mlp_inputs=("mlp.gate_proj", "mlp.up_proj"),
    mlp_output="mlp.down_proj",
    mlp_norm="post_attention_layernorm",
    mlp_value="mlp.up_proj",
    kv_layers_name=("*k_proj", "*v_proj"),
    q_layer_name="*q_proj",
    exclude_layers_name="lm_head",
    fused=(QKV, GATE_UP),
)
"""RMSNorm, attention and a gated MLP, with a layer for each projection: Llama and most later families."""

UNGATED = attrs.evolve(LLAMA_LIKE, mlp_inputs="mlp.up_proj", mlp_value=None, fused=(QKV,))
"""Llama's attention, and an MLP of two projections.

The activation of the MLP is not a plain ReLU, so no scale can be moved through the MLP.
"""

NORMS_AFTER = attrs.evolve(
    LLAMA_LIKE,
    attention_norm=None,
    attention_output_norm="post_attention_layernorm",
    key_norms="self_attn.k_norm",
    mlp_norm=None,
    mlp_output_norm="post_feedforward_layernorm",
)
"""Norms after attention and after the MLP, and on keys and queries.

No norm feeds a projection, so no scale can be moved from a norm into a projection.
"""

DENSE_OR_MIXTURE = attrs.evolve(LLAMA_LIKE, experts="mlp.experts", router="mlp.gate")
"""Llama's blocks, with a mixture of experts instead of the MLP in some of them."""

MIXTURE = attrs.evolve(DENSE_OR_MIXTURE, mlp_inputs=(), mlp_output=None, mlp_value=None)
"""Llama's attention, and a mixture of experts in every block."""

SHARED_EXPERT: dict[str, Any] = {
    "shared_experts": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"),
    "shared_expert_value": "mlp.shared_expert.up_proj",
    "shared_expert_gate": "mlp.shared_expert_gate",
}
"""Differences of a mixture of experts with one shared expert whose output is gated. The names are Qwen's."""

DEEPSEEK_MOE_LIKE = attrs.evolve(
    DENSE_OR_MIXTURE,
    shared_experts=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"),
    shared_expert_value="mlp.shared_experts.up_proj",
)
"""Llama's attention, with dense MLPs in the first blocks and mixtures with shared experts in the others.
"""

DEEPSEEK_LIKE = attrs.evolve(
    DEEPSEEK_MOE_LIKE,
    attention_inputs=("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    attention_inner=("self_attn.q_b_proj", "self_attn.kv_b_proj"),
    query_projections="self_attn.q_b_proj",
    key_projections=(),  # kv_b_proj computes keys and values together, and kv_a_proj_with_mqa a part of the keys
    value_projections=(),
    attention_inner_norms=(("self_attn.q_a_layernorm", ("self_attn.q_b_proj",)), ("self_attn.kv_a_layernorm", ("self_attn.kv_b_proj",))),
    attention_value="self_attn.kv_b_proj",
    attention_value_rows="last_of_each_head",
    fused=(GATE_UP,),
)
"""Multi-head latent attention (low-rank queries, keys and values) before the MLPs and mixtures of
DeepSeek-MoE: DeepSeek-V2 and after.
"""

SPARSE_DEEPSEEK_LIKE = attrs.evolve(
    DEEPSEEK_LIKE,
    attention_inputs=(*DEEPSEEK_LIKE.attention_inputs, "self_attn.indexer.wk", "self_attn.indexer.weights_proj"),
    attention_inner=(*DEEPSEEK_LIKE.attention_inner, "self_attn.indexer.wq_b"),
    attention_inner_norms=(
        ("self_attn.q_a_layernorm", ("self_attn.q_b_proj", "self_attn.indexer.wq_b")),
        ("self_attn.kv_a_layernorm", ("self_attn.kv_b_proj",)),
    ),
)
"""Latent attention with an indexer that selects tokens: DeepSeek-V3.2 and GLM-5."""

GEMMA_LIKE = attrs.evolve(LLAMA_LIKE, norm_has_unit_offset=True)
"""Llama's block with norms that multiply by ``1 + weight``."""

FUSED_QKV = attrs.evolve(
    LLAMA_LIKE,
    decoder_blocks="transformer.h",
    final_norm="transformer.ln_f",
    attention_inputs="self_attention.query_key_value",
    attention_output="self_attention.dense",
    query_projections=(),
    key_projections=(),
    value_projections=(),
    attention_value="self_attention.query_key_value",
    attention_value_rows="last_of_each_head",
    mlp_inputs="mlp.dense_h_to_4h",
    mlp_output="mlp.dense_4h_to_h",
    mlp_value=None,
    norm_subtracts_mean=True,
    kv_layers_name="*query_key_value",
    q_layer_name="*query_key_value",
    fused=(),
)
"""LayerNorm, one QKV matrix with the rows of each head together, and an ungated MLP:
BLOOM and GPT-NeoX.
"""

GPT2_LIKE = attrs.evolve(
    FUSED_QKV,
    embeddings="transformer.wte",
    attention_inputs="attn.c_attn",
    attention_output="attn.c_proj",
    attention_norm="ln_1",
    attention_value="attn.c_attn",
    attention_value_rows="last",
    mlp_inputs="mlp.c_fc",
    mlp_output="mlp.c_proj",
    mlp_norm="ln_2",
    kv_layers_name="*c_attn",
    q_layer_name="*c_attn",
)
"""One matrix for queries, keys and values in sequence, with GPT-2's names: GPT-2 and the first Qwen."""

LANGUAGE_MODEL: dict[str, Any] = {
    "decoder_blocks": "model.language_model.layers",
    "embeddings": "model.language_model.embed_tokens",
    "final_norm": "model.language_model.norm",
}
"""Differences of a decoder inside a vision-language model of transformers."""

TEXT_ONLY: dict[str, Any] = {
    "decoder_blocks": LLAMA_LIKE.decoder_blocks,
    "embeddings": LLAMA_LIKE.embeddings,
    "final_norm": LLAMA_LIKE.final_norm,
    "inserted_embeddings": (),
}
"""Differences of the decoder of a vision-language family if it is a separate model.

They undo `LANGUAGE_MODEL`.
"""

BEHIND_VISION_TOWER: dict[str, Any] = {
    **LANGUAGE_MODEL,
    "kv_layers_name": ("*language_model.*k_proj", "*language_model.*v_proj"),
    "q_layer_name": "*language_model.*q_proj",
    "exclude_layers_name": ("*vision_tower*", "*multi_modal_projector*", "*lm_head"),
}
"""Differences of a decoder beside a ``vision_tower`` and a ``multi_modal_projector``.

Both stay float. The patterns match only the projections of the decoder, since the tower has a ``k_proj`` too.
"""
