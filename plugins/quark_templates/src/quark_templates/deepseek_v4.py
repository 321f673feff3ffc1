"""DeepSeek-V4: one latent head of keys that are values too, compressed in most blocks; several residual streams; a mixture in every block.

Documented patterns name layers as published checkpoints do (``wkv``, ``wq_a``, ``ffn``, ``head``), transformers names them otherwise
and converts the names in reading. ``module_patterns`` says which are which, so that configurations reach the same layers in both. The facts
were checked on transformers' modules; layers that predict several tokens, ``mtp``, are not among them.
"""

from __future__ import annotations

from quark.config.architecture import Architecture

DEEPSEEK_V4 = Architecture(
    model_type="deepseek_v4",
    decoder_blocks="model.layers",
    embeddings="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    attention_inputs=("self_attn.q_a_proj", "self_attn.kv_proj"),
    attention_inner="self_attn.q_b_proj",
    attention_output="self_attn.o_b_proj",
    # In some blocks compressor and indexer read the normed input as well: no norm is named that would have these inputs alone.
    attention_norm=None,
    mlp_norm="post_attention_layernorm",
    experts="mlp.experts",
    expert_value=None,
    router="mlp.gate",
    shared_experts=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"),
    kv_layers_name=("*wkv",),
    q_layer_name=("*wq_a", "*wq_b"),
    exclude_layers_name=("*attn*", "embed", "head", "*ffn.gate*", "hc_*", "mtp.*"),
    module_patterns=(
        ("*wkv", "*self_attn.kv_proj"),
        ("*wq_a", "*self_attn.q_a_proj"),
        ("*wq_b", "*self_attn.q_b_proj"),
        ("embed", "model.embed_tokens"),
        ("head", "lm_head"),
        ("*ffn.gate*", "*mlp.gate"),
    ),
    fused=(("gate_proj", "up_proj"),),
    unsupported={"rotation": "its residual stream is several streams, mixed by weights that depend on them"},
)
