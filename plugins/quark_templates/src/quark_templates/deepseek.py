"""DeepSeek-MoE, the first: Llama's attention; the first blocks dense, the others mixtures with shared experts.

Its code comes with the checkpoints: verified on a module skeleton, after that code's names and vLLM's implementation.
"""

from __future__ import annotations

from quark.config.architecture import Architecture

DEEPSEEK = Architecture(
    model_type="deepseek",
    decoder_blocks="model.layers",
    embeddings="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    attention_inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_output="self_attn.o_proj",
    attention_norm="input_layernorm",
    attention_value="self_attn.v_proj",
    mlp_inputs=("mlp.gate_proj", "mlp.up_proj"),
    mlp_output="mlp.down_proj",
    mlp_norm="post_attention_layernorm",
    mlp_value="mlp.up_proj",
    experts="mlp.experts",
    router="mlp.gate",
    shared_experts=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"),
    shared_expert_value="mlp.shared_experts.up_proj",
    kv_layers_name=("*k_proj", "*v_proj"),
    q_layer_name="*q_proj",
    exclude_layers_name=("lm_head", "*.gate", "*.gate.linear"),
    fused=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
)
