"""Templates of DeepSeek. These are mixture-of-experts models with shared experts and, since V2, with latent
attention.

Kimi and dots.llm1 have the same architectures.
"""

from __future__ import annotations

import attrs

from quark_templates.bases import DEEPSEEK_LIKE, DEEPSEEK_MOE_LIKE, GATE_UP, LANGUAGE_MODEL, MIXTURE, SPARSE_DEEPSEEK_LIKE

# The code comes with the checkpoints: verified on a module skeleton, after that code's names and vLLM's
# implementation.
DEEPSEEK = attrs.evolve(DEEPSEEK_MOE_LIKE, model_type="deepseek", exclude_layers_name=("lm_head", "*.gate", "*.gate.linear"))

# DeepSeek-OCR, whose configurations have this model type: the first DeepSeek-MoE's blocks beside two vision
# towers. AMD Quark's exclusions are names of that model; DeepSeek-VL2 itself, of the same type, has its parts
# at "vision", "projector" and "language", which none of them matches. The code comes with the checkpoints:
# verified on a module skeleton, after that code's names.
DEEPSEEK_VL_V2 = attrs.evolve(
    DEEPSEEK_MOE_LIKE,
    model_type="deepseek_vl_v2",
    exclude_layers_name=("lm_head", "model.sam_model*", "model.vision_model*", "model.projector*"),
    unsupported={"rotation.r1": "the separators between image rows enter the residual stream as bare parameters"},
)

DOTS1 = attrs.evolve(DEEPSEEK_MOE_LIKE, model_type="dots1", key_norms="self_attn.k_norm", exclude_layers_name=("lm_head", "*mlp.gate"))

DEEPSEEK_V2 = attrs.evolve(
    DEEPSEEK_LIKE,
    model_type="deepseek_v2",
    kv_layers_name="*kv_b_proj",
    q_layer_name=("*q_a_proj", "*q_b_proj"),
    exclude_layers_name=("lm_head", "*self_attn*", "*mlp.gate", "*mlp.gate.linear"),
    algorithm_defaults={"smoothquant": {"alpha": 0.8}, "autosmoothquant": {"compute_scale_loss": "MAE"}},
)
DEEPSEEK_V3 = attrs.evolve(DEEPSEEK_V2, model_type="deepseek_v3")

DEEPSEEK_V32 = attrs.evolve(
    SPARSE_DEEPSEEK_LIKE,
    model_type="deepseek_v32",
    kv_layers_name=DEEPSEEK_V2.kv_layers_name,
    q_layer_name=DEEPSEEK_V2.q_layer_name,
    exclude_layers_name=("lm_head", "*mlp.gate", "*mlp.gate.linear", "model.layers.61.*", "*self_attn*"),
)

# One latent head of keys that are values too, compressed in most blocks; several residual streams; a mixture
# in every block. AMD Quark's patterns name layers as published checkpoints do (wkv, wq_a, ffn, head);
# transformers renames them when it reads a checkpoint, and module_patterns says which are which. The facts
# were checked on transformers' modules, which lack the multi-token prediction layers, mtp.
DEEPSEEK_V4 = attrs.evolve(
    MIXTURE,
    model_type="deepseek_v4",
    attention_inputs=("self_attn.q_a_proj", "self_attn.kv_proj"),
    attention_inner="self_attn.q_b_proj",
    attention_output="self_attn.o_b_proj",
    query_projections="self_attn.q_b_proj",
    key_projections=(),  # kv_proj computes keys and values
    value_projections=(),
    # In some blocks the compressor and the indexer also read the output of the norm, so attention_inputs are
    # not all layers that the norm feeds.
    attention_norm=None,
    attention_value=None,
    expert_value=None,
    shared_experts=DEEPSEEK_MOE_LIKE.shared_experts,
    kv_layers_name="*wkv",
    q_layer_name=("*wq_a", "*wq_b"),
    exclude_layers_name=("*attn*", "embed", "head", "*ffn.gate*", "hc_*", "mtp.*"),
    module_patterns=(
        ("*wkv", "*self_attn.kv_proj"),
        ("*wq_a", "*self_attn.q_a_proj"),
        ("*wq_b", "*self_attn.q_b_proj"),
        ("embed", "model.embed_tokens"),
        ("head", "lm_head"),
        ("*ffn.gate*", "*mlp.gate"),
    ),
    fused=(GATE_UP,),
    unsupported={"rotation.r1": "it has several residual streams, mixed with weights that depend on the data"},
)

# AMD Quark's templates of Kimi quantize the routed experts alone. The code comes with the checkpoints and
# derives from DeepSeek-V3's: verified on transformers' DeepSeek-V3 under this name, and on a module skeleton
# whose experts are modules of their own, as in that code.
KIMI_K2 = attrs.evolve(
    DEEPSEEK_LIKE,
    model_type="kimi_k2",
    kv_layers_name=("*kv_a_proj_with_mqa", "*kv_b_proj"),
    q_layer_name="*q_a_proj",
    exclude_layers_name=("*self_attn*", "*mlp.gate", "*lm_head", "*mlp.gate_proj", "*mlp.up_proj", "*mlp.down_proj", "*shared_experts*"),
)

# Kimi-K2.5 and K2.6. Published checkpoints name the decoder "language_model.model", transformers
# "model.language_model"; the patterns fit both.
KIMI_K25 = attrs.evolve(
    KIMI_K2,
    **LANGUAGE_MODEL,
    model_type="kimi_k25",
    inserted_embeddings="model.mm_projector.out_proj",
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
)

# Blocks of Kimi's delta attention or of latent attention with a gate on its output. Each sublayer reads a
# mixture of what earlier blocks gave, weighted by "…_res_proj". Routed experts work on fewer channels,
# between two projections. Gates and gated values are saturated (SiTU), so no scale passes an MLP. AMD Quark's
# template quantizes attention, the dense MLP, shared and routed experts. The code comes with the checkpoints:
# verified on a module skeleton, after their names and the implementations of runtimes.
KIMI_K3 = attrs.evolve(
    DEEPSEEK_LIKE,
    model_type="kimi_k3",
    decoder_blocks="language_model.model.layers",
    embeddings="language_model.model.embed_tokens",
    final_norm="language_model.model.norm",
    head="language_model.lm_head",
    attention_inputs=(*DEEPSEEK_LIKE.attention_inputs, "self_attn.g_proj"),
    mixer=(
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.f_a_proj",
        "self_attn.f_b_proj",
        "self_attn.b_proj",
        "self_attn.g_proj",
        "self_attn.o_proj",
    ),
    mixer_context="self_attn.f_b_proj",
    mlp_norm=None,  # in mixtures the norm feeds the projection in front of the experts, not the experts
    mlp_value=None,
    experts="block_sparse_moe.experts",
    router="block_sparse_moe.gate",
    expert_inputs=("w1", "w3"),
    expert_output="w2",
    expert_value=None,
    shared_experts=(
        "block_sparse_moe.shared_experts.gate_proj",
        "block_sparse_moe.shared_experts.up_proj",
        "block_sparse_moe.shared_experts.down_proj",
    ),
    shared_expert_value=None,
    inserted_embeddings="mm_projector.linear_2",
    kv_layers_name=("*self_attn.k_proj", "*self_attn.v_proj", "*self_attn.kv_a_proj_with_mqa"),
    q_layer_name=("*self_attn.q_proj", "*self_attn.q_a_proj", "*self_attn.q_b_proj"),
    exclude_layers_name=(
        "*block_sparse_moe.gate*",
        "*block_sparse_moe.routed_expert_down_proj*",
        "*block_sparse_moe.routed_expert_up_proj*",
        "*lm_head*",
        "*vision_tower*",
        "*mm_projector*",
        "*self_attention_res_proj*",
        "*mlp_res_proj*",
        "*output_attn_res_proj*",
        "*self_attn.*_conv1d*",
    ),
    fused=(GATE_UP, ("w1", "w3")),
    unsupported={
        "rotation.r1": "its sublayers read mixtures of earlier outputs, not one residual stream",
        "rotation.r2": "a gate scales single channels of the values",
    },
)
