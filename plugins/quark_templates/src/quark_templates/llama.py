"""Templates of families with Llama's block (RMSNorm, grouped-query attention, gated MLP) or a variant of it.

They are in this order: Meta's Llama and vision-language models with Llama's decoder; SmolLM3, Helium,
Seed-OSS, Hunyuan, Instella, StableLM, EXAONE, Arcee, Apertus, Nemotron, StarCoder2; Mistral and Mixtral;
OLMo; Granite; Command (Cohere); ERNIE; LFM2; Phi.
"""

from __future__ import annotations

import attrs

from quark_templates.bases import BEHIND_VISION_TOWER, DEEPSEEK_MOE_LIKE, LANGUAGE_MODEL, LLAMA_LIKE, MIXTURE, NORMS_AFTER, QKV, UNGATED

LLAMA = attrs.evolve(LLAMA_LIKE, model_type="llama", algorithm_defaults={"autosmoothquant": {"compute_scale_loss": "MAE"}})

LLAVA = attrs.evolve(LLAMA_LIKE, **BEHIND_VISION_TOWER, model_type="llava", inserted_embeddings="model.multi_modal_projector.linear_2")

# Some decoder blocks have cross-attention to an image; text without an image skips them. AMD Quark's
# exclusions do not contain the vision model's layers, so these are quantized. Static scales of these layers
# and of cross-attention need calibration data with images.
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
        ("experts.down_proj", ("experts.*.down_proj.weight",), (("Transpose", 1, 2), ("SplitFusedExperts",))),
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


# Dense families of other makers.

SMOLLM3 = attrs.evolve(LLAMA_LIKE, model_type="smollm3")  # some blocks have no rotary positions
HELIUM = attrs.evolve(LLAMA_LIKE, model_type="helium")  # rotary positions on interleaved pairs
SEED_OSS = attrs.evolve(LLAMA_LIKE, model_type="seed_oss")  # biases on queries, keys and values

# Keys and queries are normed after the rotary embedding.
HUNYUAN_V1_DENSE = attrs.evolve(
    LLAMA_LIKE,
    model_type="hunyuan_v1_dense",
    key_norms="self_attn.key_layernorm",
    algorithm_defaults={"autosmoothquant": {"compute_scale_loss": "MAE"}},
)

# Keys are normed across all heads. The code comes with the checkpoints: verified on a module skeleton, after
# AMD's implementation.
INSTELLA = attrs.evolve(
    LLAMA_LIKE,
    model_type="instella",
    key_norms="self_attn.k_norm",
    attention_norm="pre_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
)

# Models with use_parallel_residual (StableLM 2 12B) have no post_attention_layernorm: there input_layernorm
# feeds attention and MLP.
STABLELM = attrs.evolve(LLAMA_LIKE, model_type="stablelm", key_norms="self_attn.k_layernorm", norm_subtracts_mean=True)

EXAONE4 = attrs.evolve(NORMS_AFTER, model_type="exaone4")

ARCEE = attrs.evolve(UNGATED, model_type="arcee")  # squared ReLU: a scale would pass it squared

APERTUS = attrs.evolve(
    UNGATED,
    model_type="apertus",
    key_norms="self_attn.k_norm",
    attention_norm="attention_layernorm",
    mlp_norm="feedforward_layernorm",
)

# LayerNorm with bias that multiplies by 1 + weight.
NEMOTRON = attrs.evolve(UNGATED, model_type="nemotron", norm_has_unit_offset=True, norm_subtracts_mean=True)

STARCODER2 = attrs.evolve(
    UNGATED,
    model_type="starcoder2",
    mlp_inputs="mlp.c_fc",
    mlp_output="mlp.c_proj",
    norm_subtracts_mean=True,
)


# Mistral: sliding-window attention.
MISTRAL = attrs.evolve(LLAMA_LIKE, model_type="mistral")
MINISTRAL = attrs.evolve(LLAMA_LIKE, model_type="ministral")  # some blocks have no sliding window
MINISTRAL3 = attrs.evolve(LLAMA_LIKE, model_type="ministral3")  # queries are scaled by their position

MIXTRAL = attrs.evolve(
    MIXTURE,
    model_type="mixtral",
    exclude_layers_name=("lm_head", "*.gate", "*.gate.linear"),
    algorithm_defaults={"smoothquant": {"alpha": 0.8}, "autosmoothquant": {"compute_scale_loss": "MAE"}},
)

MISTRAL3 = attrs.evolve(
    LLAMA_LIKE, **BEHIND_VISION_TOWER, model_type="mistral3", inserted_embeddings="model.multi_modal_projector.linear_2"
)


# OLMo: other norms in each generation.
OLMO = attrs.evolve(LLAMA_LIKE, model_type="olmo", norm_has_weight=False, norm_subtracts_mean=True)
OLMO2 = attrs.evolve(NORMS_AFTER, model_type="olmo2")
OLMO3 = attrs.evolve(NORMS_AFTER, model_type="olmo3")  # sliding windows in most blocks
OLMOE = attrs.evolve(MIXTURE, model_type="olmoe", key_norms="self_attn.k_norm", exclude_layers_name=("lm_head", "*.gate"))


# Granite 3 has multipliers on embeddings, attention, residuals and logits; Granite 4 has Mamba-2 or attention
# before a mixture.
GRANITE = attrs.evolve(LLAMA_LIKE, model_type="granite")

# Mixture and shared MLP both have gate and up in one matrix.
GRANITEMOEHYBRID = attrs.evolve(
    MIXTURE,
    model_type="granitemoehybrid",
    mixer=("mamba.in_proj", "mamba.out_proj"),
    experts="block_sparse_moe.experts",
    router="block_sparse_moe.router",
    shared_experts=("shared_mlp.input_linear", "shared_mlp.output_linear"),
    shared_expert_value="shared_mlp.input_linear",
    shared_expert_value_rows="last",
    exclude_layers_name=("lm_head", "*router*"),
    weight_converters=(
        (
            "block_sparse_moe.input_linear.weight",
            ("block_sparse_moe.experts.*.gate_proj.weight", "block_sparse_moe.experts.*.up_proj.weight"),
            (("SplitFusedExperts", 0),),
        ),
        ("block_sparse_moe.output_linear.weight", ("block_sparse_moe.experts.*.down_proj.weight",), (("SplitFusedExperts",),)),
    ),
    algorithm_defaults={"smoothquant": {"alpha": 0.8}, "autosmoothquant": {"compute_scale_loss": "MAE"}},
)


# Command: attention and MLP side by side, both fed by one LayerNorm without a bias.
# Sliding windows in most blocks.
COHERE2 = attrs.evolve(LLAMA_LIKE, model_type="cohere2", mlp_norm="input_layernorm", norm_subtracts_mean=True)

COHERE = attrs.evolve(
    COHERE2,
    model_type="cohere",
    key_norms="self_attn.k_norm",  # with use_qk_norm
    algorithm_defaults={"smoothquant": {"alpha": 0.5}},
)


# ERNIE 4.5: rotary positions pair by pair, and a mixture of DeepSeek-MoE's form.
ERNIE4_5 = attrs.evolve(LLAMA_LIKE, model_type="ernie4_5")
ERNIE4_5_MOE = attrs.evolve(DEEPSEEK_MOE_LIKE, model_type="ernie4_5_moe", exclude_layers_name=("lm_head", "*mlp.gate"))


# LFM2: blocks of attention or of a short gated convolution, whose projections stay float; the MLP is
# ``w2(silu(w1(x)) * w3(x))``.
LFM2 = attrs.evolve(
    LLAMA_LIKE,
    model_type="lfm2",
    final_norm="model.embedding_norm",
    attention_output="self_attn.out_proj",
    key_norms="self_attn.k_layernorm",
    attention_norm="operator_norm",
    mixer=("conv.in_proj", "conv.out_proj"),
    mlp_inputs=("feed_forward.w1", "feed_forward.w3"),
    mlp_output="feed_forward.w2",
    mlp_norm="ffn_norm",
    mlp_value="feed_forward.w3",
    kv_layers_name=("*self_attn.k_proj", "*self_attn.v_proj"),
    q_layer_name="*self_attn.q_proj",
    exclude_layers_name=("lm_head", "*conv.in_proj", "*conv.out_proj"),
    fused=(QKV, ("w1", "w3")),
)


# Phi: parallel attention and MLP in Phi-1 and Phi-2, fused projections in Phi-3, a mixture in Phi-3.5-MoE.

# One LayerNorm feeds attention and MLP; biases throughout.
PHI = attrs.evolve(
    UNGATED,
    model_type="phi",
    final_norm="model.final_layernorm",
    attention_output="self_attn.dense",
    key_norms="self_attn.k_layernorm",  # with qk_layernorm
    mlp_inputs="mlp.fc1",
    mlp_output="mlp.fc2",
    mlp_norm="input_layernorm",
    norm_subtracts_mean=True,
)

PHI3 = attrs.evolve(
    LLAMA_LIKE,
    model_type="phi3",
    attention_inputs="self_attn.qkv_proj",
    query_projections=(),
    key_projections=(),
    value_projections=(),
    attention_value="self_attn.qkv_proj",
    attention_value_rows="last",
    mlp_inputs="mlp.gate_up_proj",
    mlp_value="mlp.gate_up_proj",
    mlp_value_rows="last",
    kv_layers_name="*qkv_proj",
    q_layer_name="*qkv_proj",
    fused=(),
)

# LayerNorm; biases throughout.
PHIMOE = attrs.evolve(
    MIXTURE, model_type="phimoe", router="mlp.router", norm_subtracts_mean=True, exclude_layers_name=("lm_head", "*router")
)
