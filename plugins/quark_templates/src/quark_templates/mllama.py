"""Llama 3.2 Vision: Llama's decoder with blocks of cross-attention to an image among the others; text alone does not pass those.

The documented exclusions leave the vision model's layers to be quantized. Static scales of these, and of the blocks of cross-attention,
want calibration data with images, or further exclusions.
"""

from __future__ import annotations

from quark.config.architecture import Architecture

MLLAMA = Architecture(
    model_type="mllama",
    decoder_blocks="model.language_model.layers",
    embeddings="model.language_model.embed_tokens",
    final_norm="model.language_model.norm",
    head="lm_head",
    attention_inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_output="self_attn.o_proj",
    attention_norm="input_layernorm",
    attention_value="self_attn.v_proj",
    mixer=("cross_attn.q_proj", "cross_attn.k_proj", "cross_attn.v_proj", "cross_attn.o_proj"),
    mixer_context=("cross_attn.k_proj", "cross_attn.v_proj"),
    mlp_inputs=("mlp.gate_proj", "mlp.up_proj"),
    mlp_output="mlp.down_proj",
    mlp_norm="post_attention_layernorm",
    mlp_value="mlp.up_proj",
    kv_layers_name=("*language_model.*k_proj", "*language_model.*v_proj"),
    q_layer_name="*self_attn.q_proj",
    exclude_layers_name=("*lm_head", "*patch_embedding", "multi_modal_projector"),
    fused=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
)
