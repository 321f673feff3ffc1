"""Dense families by other makers that keep Llama's block, and say here what they change in it."""

from __future__ import annotations

import attrs

from quark_templates.bases import LLAMA_LIKE, NORMS_AFTER, QKV, UNGATED

__all__ = [
    "APERTUS",
    "ARCEE",
    "EXAONE4",
    "HELIUM",
    "HUNYUAN_V1_DENSE",
    "INSTELLA",
    "NEMOTRON",
    "SEED_OSS",
    "SMOLLM3",
    "STABLELM",
    "STARCODER2",
]

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
    LLAMA_LIKE,
    model_type="starcoder2",
    mlp_inputs="mlp.c_fc",
    mlp_output="mlp.c_proj",
    mlp_value=None,
    norm_subtracts_mean=True,
    fused=(QKV,),
)
