"""Templates of Qwen, from the first to Qwen4, and of InternVL, which has Qwen's decoder."""

from __future__ import annotations

import attrs

from quark.config.architecture import FUSED_EXPERTS
from quark_templates.bases import (
    BEHIND_VISION_TOWER,
    GATE_UP,
    GPT2_LIKE,
    LANGUAGE_MODEL,
    LLAMA_LIKE,
    MIXTURE,
    QKV,
    SHARED_EXPERT,
    TEXT_ONLY,
)

# The gate of the MLP is its second matrix. The code comes with the checkpoints: verified on a module
# skeleton, after that code's names and forward pass.
QWEN = attrs.evolve(
    GPT2_LIKE,
    model_type="qwen",
    mlp_inputs=("mlp.w1", "mlp.w2"),
    mlp_value="mlp.w1",
    norm_subtracts_mean=False,
    fused=(("w2", "w1"),),
)

QWEN2 = attrs.evolve(LLAMA_LIKE, model_type="qwen2")  # biases on queries, keys and values
QWEN2_VL = attrs.evolve(
    QWEN2,
    **LANGUAGE_MODEL,
    model_type="qwen2_vl",
    inserted_embeddings="model.visual.merger.mlp.2",
    exclude_layers_name=("lm_head", "*.visual.*"),
)
QWEN2_5_VL = attrs.evolve(QWEN2_VL, model_type="qwen2_5_vl")
QWEN2_MOE = attrs.evolve(
    MIXTURE,
    **SHARED_EXPERT,
    model_type="qwen2_moe",
    exclude_layers_name=("lm_head", "*.gate", "*.gate.linear", "*.shared_expert_gate"),
)

QWEN3 = attrs.evolve(LLAMA_LIKE, model_type="qwen3", key_norms="self_attn.k_norm")
QWEN3_MOE = attrs.evolve(
    MIXTURE, model_type="qwen3_moe", key_norms=QWEN3.key_norms, exclude_layers_name=("lm_head", "*.gate", "*.gate.linear")
)
QWEN3_VL = attrs.evolve(
    QWEN3,
    **LANGUAGE_MODEL,
    model_type="qwen3_vl",
    inserted_embeddings=("model.visual.merger.linear_fc2", "model.visual.deepstack_merger_list.*.linear_fc2"),
    exclude_layers_name=("lm_head", "*.visual.*"),
)
QWEN3_VL_MOE = attrs.evolve(
    QWEN3_MOE,
    **LANGUAGE_MODEL,
    model_type="qwen3_vl_moe",
    inserted_embeddings=QWEN3_VL.inserted_embeddings,
    exclude_layers_name=("lm_head", "*mlp.gate", "*mlp.gate.linear", "*.visual.*"),
    # Published checkpoints store the fused experts transposed, [E, H, 2 I] and [E, I, H].
    weight_converters=(
        ("gate_up_proj", ("gate_proj.weight", "up_proj.weight"), (("Transpose", 1, 2), ("SplitFusedExperts", 0))),
        ("down_proj", ("down_proj.weight",), (("Transpose", 1, 2), ("SplitFusedExperts",))),
    ),
)

# Blocks of linear attention (gated delta net) or of gated attention, each with a mixture. AMD Quark's
# patterns for the cache name the projections of linear attention, which is excluded.
QWEN3_NEXT = attrs.evolve(
    MIXTURE,
    **SHARED_EXPERT,
    model_type="qwen3_next",
    key_norms=QWEN3.key_norms,
    mixer=("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.out_proj"),
    norm_has_unit_offset=True,
    kv_layers_name="*qkvz",
    q_layer_name="*qkvz",
    exclude_layers_name=(
        "lm_head",
        "mtp.fc",
        "*linear_attn.in_proj_ba",
        "*linear_attn.in_proj_qkvz",
        "*mlp.gate",
        "*mlp.gate.linear",
        "*mlp.shared_expert_gate",
        "*self_attn.k_proj",
        "*self_attn.q_proj",
        "*self_attn.v_proj",
    ),
)

QWEN3_5 = attrs.evolve(
    QWEN3,
    **LANGUAGE_MODEL,
    model_type="qwen3_5",
    mixer=(
        "linear_attn.in_proj_qkv",
        "linear_attn.in_proj_z",
        "linear_attn.in_proj_b",
        "linear_attn.in_proj_a",
        "linear_attn.out_proj",
    ),
    norm_has_unit_offset=True,
    inserted_embeddings="model.visual.merger.linear_fc2",
    kv_layers_name=("*self_attn.k_proj", "*self_attn.v_proj"),
    q_layer_name="*self_attn.q_proj",
    exclude_layers_name=("lm_head", "model.visual.*", "*mtp*"),
    fused=(QKV, GATE_UP, ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a")),
    algorithm_defaults={"smoothquant": {"alpha": 0.5}},
)
QWEN3_5_TEXT = attrs.evolve(QWEN3_5, **TEXT_ONLY, model_type="qwen3_5_text", exclude_layers_name=("lm_head", "*mtp*"))

# In the decoder, AMD Quark's template quantizes only the routed experts.
QWEN3_5_MOE = attrs.evolve(
    MIXTURE,
    **LANGUAGE_MODEL,
    **SHARED_EXPERT,
    model_type="qwen3_5_moe",
    key_norms=QWEN3.key_norms,
    mixer=QWEN3_5.mixer,
    norm_has_unit_offset=True,
    inserted_embeddings=QWEN3_5.inserted_embeddings,
    exclude_layers_name=(
        "lm_head",
        "model.visual.*",
        "mtp.*",
        "*mlp.gate",
        "*mlp.gate.linear",
        "*shared_expert_gate*",
        "*.linear_attn.*",
        "*.self_attn.*",
        "*.shared_expert.*",
    ),
    fused=QWEN3_5.fused,
    weight_converters=FUSED_EXPERTS,
    algorithm_defaults={"smoothquant": {"alpha": 0.5}, "autosmoothquant": {"compute_scale_loss": "MAE"}},
)
QWEN3_5_MOE_TEXT = attrs.evolve(
    QWEN3_5_MOE,
    **TEXT_ONLY,
    model_type="qwen3_5_moe_text",
    exclude_layers_name=tuple(p for p in QWEN3_5_MOE.exclude_layers_name if p != "model.visual.*"),
)

# Qwen3.5's mixtures with several residual streams, whose norms lie in the connections between them, and an
# indexer that chooses the tokens which attention reads. Some blocks add embeddings of runs of tokens (ple).
QWEN4_EXP = attrs.evolve(
    QWEN3_5_MOE,
    model_type="qwen4_exp",
    final_norm=None,
    attention_inputs=(*QWEN3_5_MOE.attention_inputs, "self_attn.indexer.index_qk_proj"),
    attention_norm=None,
    mlp_norm=None,
    kv_layers_name=("*self_attn.k_proj", "*self_attn.v_proj"),
    q_layer_name="*self_attn.q_proj",
    exclude_layers_name=(
        "lm_head",
        "model.visual.*",
        "mtp.*",
        "*mlp.gate",
        "*shared_expert_gate*",
        "*.linear_attn.*",
        "*.self_attn.*",
        "*hyper_connection*",
        "*.ple.*",
    ),
    algorithm_defaults={},
    unsupported={"rotation.r1": "it has several residual streams, mixed with weights that depend on the data"},
)
QWEN4_EXP_TEXT = attrs.evolve(QWEN4_EXP, **TEXT_ONLY | {"final_norm": None}, model_type="qwen4_exp_text")

INTERNVL = attrs.evolve(
    LLAMA_LIKE,
    **BEHIND_VISION_TOWER,
    model_type="internvl",
    key_norms=QWEN3.key_norms,  # in InternVL 3.5, whose decoder is Qwen3's
    inserted_embeddings="model.multi_modal_projector.linear_2",
)
