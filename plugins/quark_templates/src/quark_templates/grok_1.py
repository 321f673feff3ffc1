"""Grok-1: attention and a mixture of experts in every block, each between two norms; experts of ``linear``, ``linear_v`` and ``linear_1``.

Its code comes with the checkpoints in Hugging Face form: verified on a module skeleton, after that code's names and vLLM's implementation.
"""

from __future__ import annotations

from quark.config.architecture import Architecture

GROK_1 = Architecture(
    model_type="grok-1",
    decoder_blocks="model.layers",
    embeddings="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    attention_inputs=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    attention_output="attn.o_proj",
    attention_norm="pre_attn_norm",
    attention_value="attn.v_proj",
    attention_output_norm="post_attn_norm",
    mlp_norm="pre_moe_norm",
    mlp_output_norm="post_moe_norm",
    experts="moe_block.experts",
    router="moe_block.gate",
    expert_inputs=("linear", "linear_v"),
    expert_output="linear_1",
    expert_value="linear_v",
    kv_layers_name=("*k_proj", "*v_proj"),
    q_layer_name="*q_proj",
    gate_up_layers_name=("linear", "linear_v"),
    exclude_layers_name=("lm_head", "*.gate", "*.gate.linear"),
    fused=(("q_proj", "k_proj", "v_proj"), ("linear", "linear_v")),
)
