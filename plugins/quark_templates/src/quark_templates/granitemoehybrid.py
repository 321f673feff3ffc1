"""Granite 4: blocks of Mamba-2 or attention, each with a mixture and a shared MLP, both with gate and up in one matrix."""

from __future__ import annotations

from quark.config.architecture import Architecture

GRANITEMOEHYBRID = Architecture(
    model_type="granitemoehybrid",
    decoder_blocks="model.layers",
    embeddings="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    attention_inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_output="self_attn.o_proj",
    attention_norm="input_layernorm",
    attention_value="self_attn.v_proj",
    mixer=("mamba.in_proj", "mamba.out_proj"),
    mlp_norm="post_attention_layernorm",
    experts="block_sparse_moe.experts",
    router="block_sparse_moe.router",
    shared_experts=("shared_mlp.input_linear", "shared_mlp.output_linear"),
    shared_expert_value="shared_mlp.input_linear",
    shared_expert_value_rows="last",
    kv_layers_name=("*k_proj", "*v_proj"),
    q_layer_name="*q_proj",
    exclude_layers_name=("lm_head", "*router*"),
    fused=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
    weight_converters=(
        (
            "block_sparse_moe.input_linear.weight",
            ("block_sparse_moe.experts.*.gate_proj.weight", "block_sparse_moe.experts.*.up_proj.weight"),
            (("SplitFusedExperts", 0),),
        ),
        ("block_sparse_moe.output_linear.weight", ("block_sparse_moe.experts.*.down_proj.weight",), (("SplitFusedExperts", 0),)),
    ),
    algorithm_defaults={"smoothquant": {"alpha": 0.8}, "autosmoothquant": {"compute_scale_loss": "MAE"}},
)
