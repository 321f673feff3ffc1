"""Templates of GPT and of other early decoders with LayerNorm and ungated MLPs.

This file also has the template of GPT-OSS, a mixture-of-experts model with Llama's attention.
"""

from __future__ import annotations

import attrs

from quark_templates.bases import FUSED_QKV, GPT2_LIKE, LLAMA_LIKE, MIXTURE, QKV, UNGATED

# Weights are stored as [in_features, out_features], as Conv1D has them.
GPT2 = attrs.evolve(GPT2_LIKE, model_type="gpt2", position_embeddings="transformer.wpe")

# One LayerNorm feeds attention and MLP; biases in the MLP and in the head.
GPTJ = attrs.evolve(
    UNGATED,
    model_type="gptj",
    decoder_blocks="transformer.h",
    embeddings="transformer.wte",
    final_norm="transformer.ln_f",
    attention_inputs=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    attention_output="attn.out_proj",
    query_projections="attn.q_proj",
    key_projections="attn.k_proj",
    value_projections="attn.v_proj",
    attention_norm="ln_1",
    attention_value="attn.v_proj",
    mlp_inputs="mlp.fc_in",
    mlp_output="mlp.fc_out",
    mlp_norm="ln_1",
    norm_subtracts_mean=True,
)

GPT_NEOX = attrs.evolve(
    FUSED_QKV,
    model_type="gpt_neox",
    decoder_blocks="gpt_neox.layers",
    embeddings="gpt_neox.embed_in",
    final_norm="gpt_neox.final_layer_norm",
    attention_inputs="attention.query_key_value",
    attention_output="attention.dense",
    attention_value="attention.query_key_value",
)

# ALiBi instead of positions; a norm on the embeddings.
BLOOM = attrs.evolve(
    FUSED_QKV,
    model_type="bloom",
    embeddings="transformer.word_embeddings",
    embedding_norm="transformer.word_embeddings_layernorm",
)

# Falcon 7B, the form of the default configuration: one norm feeds attention and MLP; all heads share one key
# and value, so no scale is moved from values. Falcon 40B and 180B (new_decoder_architecture) have a norm for
# each of the two, ln_attn and ln_mlp; all else is the same.
FALCON = attrs.evolve(
    FUSED_QKV,
    model_type="falcon",
    embeddings="transformer.word_embeddings",
    attention_value=None,
    attention_value_rows="all",
    mlp_norm="input_layernorm",
)

# Learned positions; the MLP lies directly in the block, and its ReLU lets positive factors pass, so fc1 is
# its value.
OPT = attrs.evolve(
    LLAMA_LIKE,
    model_type="opt",
    decoder_blocks="model.decoder.layers",
    embeddings="model.decoder.embed_tokens",
    final_norm="model.decoder.final_layer_norm",
    attention_output="self_attn.out_proj",
    attention_norm="self_attn_layer_norm",
    mlp_inputs="fc1",
    mlp_output="fc2",
    mlp_norm="final_layer_norm",
    mlp_value="fc1",
    norm_subtracts_mean=True,
    position_embeddings="model.decoder.embed_positions",
    fused=(QKV,),
)

# Attention with sinks. Gate and up columns of an expert alternate in one matrix; experts have biases.
GPT_OSS = attrs.evolve(
    MIXTURE,
    model_type="gpt_oss",
    router="mlp.router",
    expert_inputs="gate_up_proj",
    expert_value=None,
    exclude_layers_name=("lm_head", "*router*"),
    fused=(QKV,),
    weight_converters=(
        ("experts.gate_up_proj", ("experts.*.gate_up_proj.weight",), (("Transpose", 1, 2), ("SplitFusedExperts",))),
        ("experts.down_proj", ("experts.*.down_proj.weight",), (("Transpose", 1, 2), ("SplitFusedExperts",))),
        ("experts.gate_up_proj_bias", ("experts.*.gate_up_proj.bias",), (("SplitFusedExperts", 0, 2),)),
        ("experts.down_proj_bias", ("experts.*.down_proj.bias",), (("SplitFusedExperts", 0, 2),)),
    ),
)
