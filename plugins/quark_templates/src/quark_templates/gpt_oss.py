"""GPT-OSS: attention with sinks; experts with biases, their gate and up columns alternating in one matrix."""

from __future__ import annotations

from quark.config.architecture import Architecture

GPT_OSS = Architecture(
    model_type="gpt_oss",
    decoder_blocks="model.layers",
    embeddings="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    attention_inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_output="self_attn.o_proj",
    attention_norm="input_layernorm",
    attention_value="self_attn.v_proj",
    mlp_norm="post_attention_layernorm",
    experts="mlp.experts",
    router="mlp.router",
    expert_inputs="gate_up_proj",
    expert_value=None,
    kv_layers_name=("*k_proj", "*v_proj"),
    q_layer_name="*q_proj",
    exclude_layers_name=("lm_head", "*router*"),
    fused=(("q_proj", "k_proj", "v_proj"),),
    weight_converters=(
        ("experts.gate_up_proj", ("experts.*.gate_up_proj.weight",), (("Transpose", 1, 2), ("SplitFusedExperts", 0))),
        ("experts.down_proj", ("experts.*.down_proj.weight",), (("Transpose", 1, 2), ("SplitFusedExperts", 0))),
        ("experts.gate_up_proj_bias", ("experts.*.gate_up_proj.bias",), (("SplitFusedExperts", 0, 2),)),
        ("experts.down_proj_bias", ("experts.*.down_proj.bias",), (("SplitFusedExperts", 0, 2),)),
    ),
)
