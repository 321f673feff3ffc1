"""MiniMax-M3: some blocks attend to blocks of keys that an indexer chooses, some have a dense MLP; behind a vision tower.

Gate and up of dense MLPs and shared experts are one matrix in transformers, two in published checkpoints; those of experts are two in both.
Documented patterns name the mixture as checkpoints do, ``block_sparse_moe``, and what merges patches, ``patch_merge_mlp``. In transformers
that router is no linear layer and what merges patches a part of the projector, so both stay float; the facts were checked there.
"""

from __future__ import annotations

from quark.config.architecture import Architecture

MINIMAX_M3_VL = Architecture(
    model_type="minimax_m3_vl",
    decoder_blocks="model.language_model.layers",
    embeddings="model.language_model.embed_tokens",
    final_norm="model.language_model.norm",
    head="lm_head",
    attention_inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_output="self_attn.o_proj",
    # In blocks with an indexer that reads the normed input as well: no norm is named that would have these inputs alone.
    attention_norm=None,
    attention_value="self_attn.v_proj",
    mlp_inputs="mlp.gate_up_proj",
    mlp_output="mlp.down_proj",
    mlp_norm="post_attention_layernorm",
    experts="mlp.experts",
    expert_value=None,
    router="mlp.gate",
    shared_experts=("mlp.shared_experts.gate_up_proj", "mlp.shared_experts.down_proj"),
    norm_has_unit_offset=True,
    inserted_embeddings="model.multi_modal_projector.merge_linear_2",
    kv_layers_name=("*language_model.*k_proj", "*language_model.*v_proj"),
    q_layer_name="*language_model.*q_proj",
    exclude_layers_name=(
        "*lm_head",
        "*vision_tower*",
        "*multi_modal_projector*",
        "*patch_merge_mlp*",
        "*block_sparse_moe.gate",
        "*self_attn*",
    ),
    fused=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
)
