"""Templates of GLM. These are ChatGLM, whose checkpoints contain their own code, GLM-4, which transformers
supports, and the mixture-of-experts models since GLM-4.5.
"""

from __future__ import annotations

import attrs

from quark_templates.bases import DEEPSEEK_LIKE, DEEPSEEK_MOE_LIKE, FUSED_QKV, LANGUAGE_MODEL, LLAMA_LIKE, QKV, SPARSE_DEEPSEEK_LIKE

# The head lies inside the transformer; gate and up are one matrix. The code comes with the checkpoints:
# verified on a module skeleton, after that code's names and vLLM's implementation.
CHATGLM = attrs.evolve(
    FUSED_QKV,
    model_type="chatglm",
    decoder_blocks="transformer.encoder.layers",
    embeddings="transformer.embedding.word_embeddings",
    final_norm="transformer.encoder.final_layernorm",
    head="transformer.output_layer",
    attention_value_rows="last",
    mlp_value="mlp.dense_h_to_4h",
    mlp_value_rows="last",
    norm_subtracts_mean=False,
    exclude_layers_name="transformer.output_layer",
)

# Biases on queries, keys and values; gate and up are one matrix.
GLM = attrs.evolve(
    LLAMA_LIKE, model_type="glm", mlp_inputs="mlp.gate_up_proj", mlp_value="mlp.gate_up_proj", mlp_value_rows="last", fused=(QKV,)
)

GLM4 = attrs.evolve(GLM, model_type="glm4", attention_output_norm="post_self_attn_layernorm", mlp_output_norm="post_mlp_layernorm")

GLM4V = attrs.evolve(
    GLM4,
    **LANGUAGE_MODEL,
    model_type="glm4v",
    inserted_embeddings="model.visual.merger.down_proj",
    exclude_layers_name=("lm_head", "*.visual.*"),
)

# AMD Quark's template quantizes the routed experts alone.
GLM4_MOE = attrs.evolve(
    DEEPSEEK_MOE_LIKE,
    model_type="glm4_moe",
    key_norms="self_attn.k_norm",  # with use_qk_norm
    exclude_layers_name=(
        "lm_head",
        "*mlp.gate",
        "*mlp.gate.linear",
        "*self_attn*",
        "*shared_experts.*",
        "*mlp.down_proj",
        "*mlp.gate_proj",
        "*mlp.up_proj",
    ),
)

GLM4_MOE_LITE = attrs.evolve(
    DEEPSEEK_LIKE,
    model_type="glm4_moe_lite",
    kv_layers_name=("*kv_a_proj_with_mqa", "*kv_b_proj"),
    q_layer_name="*q_a_proj",
    exclude_layers_name=("lm_head", "*self_attn*", "*mlp.gate"),
)

GLM_MOE_DSA = attrs.evolve(
    SPARSE_DEEPSEEK_LIKE,
    model_type="glm_moe_dsa",
    kv_layers_name=("*kv_a_proj_with_mqa", "*kv_b_proj"),
    q_layer_name="*q_a_proj",
    exclude_layers_name=("*self_attn*", "*mlp.gate", "*lm_head", "*mlp.gate_proj", "*mlp.up_proj", "*mlp.down_proj"),
)

# Blocks of Kimi's delta attention or of sparse latent attention, whose indexer reads the normed input by a
# matrix that is no layer. Gates and gated values are clamped, so no scale passes an MLP. AMD Quark's template
# quantizes shared and routed experts alone; layer 45 predicts several tokens.
GLM5_NEXT = attrs.evolve(
    SPARSE_DEEPSEEK_LIKE,
    **LANGUAGE_MODEL,
    model_type="glm5_next",
    attention_norm=None,
    mixer=(
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.forget_gate.f_a_proj",
        "self_attn.forget_gate.f_b_proj",
        "self_attn.b_proj",
        "self_attn.g_a_proj",
        "self_attn.g_b_proj",
        "self_attn.o_proj",
    ),
    mixer_context=("self_attn.forget_gate.f_b_proj", "self_attn.g_b_proj"),
    mlp_value=None,
    expert_value=None,
    shared_expert_value=None,
    inserted_embeddings="model.visual.merger.down_proj",
    kv_layers_name="*self_attn.kv_b_proj",
    q_layer_name="*self_attn.q_b_proj",
    exclude_layers_name=(
        "*self_attn*",
        "*mlp.gate",
        "*mlp.gate_proj",
        "*mlp.up_proj",
        "*mlp.down_proj",
        "*visual*",
        "*lm_head*",
        "model.language_model.layers.45.*",
    ),
    unsupported={"rotation.r1": "it has several residual streams, mixed with weights that depend on the data"},
)
