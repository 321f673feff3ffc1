"""Templates of encoders of text, speech and images, alone or in front of a decoder.

They are in this order: BERT, RoBERTa, DeBERTa, ModernBERT; T5, BART, Whisper; Wav2Vec2; ViT, CLIP and SigLIP.

Heads, poolers, patch embeddings and frame embeddings are not quantized. These layers are small, and a
rounding error in one of them would reach every output.
"""

from __future__ import annotations

import attrs

from quark.config.architecture import Architecture

# A norm after attention feeds the MLP and the residual stream, so no scale can be moved from it.
BERT = Architecture(
    model_type="bert",
    decoder_blocks="bert.encoder.layer",
    embeddings="bert.embeddings.word_embeddings",
    head="cls.predictions.decoder",
    attention_inputs=("attention.self.query", "attention.self.key", "attention.self.value"),
    attention_output="attention.output.dense",
    query_projections="attention.self.query",
    key_projections="attention.self.key",
    value_projections="attention.self.value",
    key_norms=(),
    attention_value="attention.self.value",
    mlp_inputs="intermediate.dense",
    mlp_output="output.dense",
    norm_subtracts_mean=True,
    embedding_norm="bert.embeddings.LayerNorm",
    position_embeddings="bert.embeddings.position_embeddings",
    exclude_layers_name=("cls.*", "*pooler.dense", "classifier*", "qa_outputs"),
    fused=(("query", "key", "value"),),
)

ROBERTA = attrs.evolve(
    BERT,
    model_type="roberta",
    decoder_blocks="roberta.encoder.layer",
    embeddings="roberta.embeddings.word_embeddings",
    head="lm_head.decoder",
    embedding_norm="roberta.embeddings.LayerNorm",
    position_embeddings="roberta.embeddings.position_embeddings",
    exclude_layers_name=("lm_head*", "*pooler.dense", "classifier*", "qa_outputs"),
)
XLM_ROBERTA = attrs.evolve(ROBERTA, model_type="xlm-roberta")

# Queries and keys also depend on relative positions, so they are not an input group.
DEBERTA_V2 = attrs.evolve(
    BERT,
    model_type="deberta-v2",
    decoder_blocks="deberta.encoder.layer",
    embeddings="deberta.embeddings.word_embeddings",
    attention_inputs="attention.self.value_proj",
    attention_inner=(
        "attention.self.query_proj",
        "attention.self.key_proj",
        "attention.self.pos_query_proj",
        "attention.self.pos_key_proj",
    ),
    query_projections="attention.self.query_proj",
    key_projections="attention.self.key_proj",
    value_projections="attention.self.value_proj",
    attention_value="attention.self.value_proj",
    embedding_norm="deberta.embeddings.LayerNorm",
    position_embeddings=None,
    fused=(),
    exclude_layers_name=("cls.*", "lm_predictions*", "mask_predictions*", "pooler.dense", "classifier*", "qa_outputs"),
)

# One matrix for queries, keys and values, head by head, and a bias of its own for each of the first and last.
DEBERTA = attrs.evolve(
    DEBERTA_V2,
    model_type="deberta",
    attention_inputs="attention.self.in_proj",
    attention_inner=("attention.self.pos_proj", "attention.self.pos_q_proj"),
    query_projections=(),
    key_projections=(),
    value_projections=(),
    attention_value=None,
)

# The first block has no norm before attention; the gate of the MLP is the last half of its first matrix.
MODERNBERT = Architecture(
    model_type="modernbert",
    decoder_blocks="model.layers",
    embeddings="model.embeddings.tok_embeddings",
    final_norm="model.final_norm",
    head="decoder",
    attention_inputs="attn.Wqkv",
    attention_output="attn.Wo",
    query_projections=(),
    key_projections=(),
    value_projections=(),
    key_norms=(),
    attention_norm="attn_norm",
    attention_value="attn.Wqkv",
    attention_value_rows="last",
    mlp_inputs="mlp.Wi",
    mlp_output="mlp.Wo",
    mlp_norm="mlp_norm",
    mlp_value="mlp.Wi",
    mlp_value_rows="last",
    norm_subtracts_mean=True,
    embedding_norm="model.embeddings.norm",
    exclude_layers_name=("head.dense", "decoder", "classifier"),
)


# The MLP is the second part of a block of the encoder, and the third of one of the decoder; it has one input
# projection, or two.
T5 = Architecture(
    model_type="t5",
    encoder_blocks="encoder.block",
    decoder_blocks="decoder.block",
    embeddings="shared",
    final_norm="decoder.final_layer_norm",
    head="lm_head",
    attention_inputs=("layer.0.SelfAttention.q", "layer.0.SelfAttention.k", "layer.0.SelfAttention.v"),
    attention_output="layer.0.SelfAttention.o",
    attention_inner=("layer.1.EncDecAttention.*", "layer.*.DenseReluDense.wi*", "layer.*.DenseReluDense.wo"),
    query_projections=("layer.0.SelfAttention.q", "layer.1.EncDecAttention.q"),
    key_projections=("layer.0.SelfAttention.k", "layer.1.EncDecAttention.k"),
    value_projections=("layer.0.SelfAttention.v", "layer.1.EncDecAttention.v"),
    key_norms=(),
    attention_norm="layer.0.layer_norm",
    attention_value="layer.0.SelfAttention.v",
    exclude_layers_name=("lm_head", "classification_head*", "qa_outputs", "classifier"),
)
MT5 = attrs.evolve(T5, model_type="mt5")
UMT5 = attrs.evolve(T5, model_type="umt5")

# Norms after the residual stream, as BERT's.
BART = Architecture(
    model_type="bart",
    encoder_blocks="model.encoder.layers",
    decoder_blocks="model.decoder.layers",
    embeddings="model.shared",
    head="lm_head",
    attention_inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_output="self_attn.out_proj",
    attention_inner=("encoder_attn.q_proj", "encoder_attn.k_proj", "encoder_attn.v_proj", "encoder_attn.out_proj"),
    query_projections=("self_attn.q_proj", "encoder_attn.q_proj"),
    key_projections=("self_attn.k_proj", "encoder_attn.k_proj"),
    value_projections=("self_attn.v_proj", "encoder_attn.v_proj"),
    key_norms=(),
    attention_value="self_attn.v_proj",
    mlp_inputs="fc1",
    mlp_output="fc2",
    norm_subtracts_mean=True,
    embedding_norm="model.decoder.layernorm_embedding",
    position_embeddings="model.decoder.embed_positions",
    exclude_layers_name=("lm_head", "classification_head*", "qa_outputs"),
    fused=(("q_proj", "k_proj", "v_proj"),),
    unsupported={"rotation.r1": "cross-attention adds to the residual stream of its decoder, with or without its encoder"},
)

WHISPER = attrs.evolve(
    BART,
    model_type="whisper",
    embeddings="model.decoder.embed_tokens",
    final_norm="model.decoder.layer_norm",
    head="proj_out",
    attention_norm="self_attn_layer_norm",
    attention_inner_norms=(("encoder_attn_layer_norm", ("encoder_attn.q_proj",)),),
    mlp_norm="final_layer_norm",
    embedding_norm=None,
    exclude_layers_name=("proj_out", "projector", "classifier"),
)


# Norms after the residual stream; with do_stable_layer_norm (the large models) before attention and MLP.
WAV2VEC2 = Architecture(
    model_type="wav2vec2",
    decoder_blocks="wav2vec2.encoder.layers",
    head="lm_head",
    attention_inputs=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    attention_output="attention.out_proj",
    query_projections="attention.q_proj",
    key_projections="attention.k_proj",
    value_projections="attention.v_proj",
    key_norms=(),
    attention_value="attention.v_proj",
    mlp_inputs="feed_forward.intermediate_dense",
    mlp_output="feed_forward.output_dense",
    norm_subtracts_mean=True,
    exclude_layers_name=("*feature_projection.projection", "lm_head", "projector", "classifier", "project_*"),
    fused=(("q_proj", "k_proj", "v_proj"),),
)

VIT = Architecture(
    model_type="vit",
    decoder_blocks="vit.layers",
    final_norm="vit.layernorm",
    head="classifier",
    attention_inputs=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    attention_output="attention.o_proj",
    query_projections="attention.q_proj",
    key_projections="attention.k_proj",
    value_projections="attention.v_proj",
    key_norms=(),
    attention_norm="layernorm_before",
    attention_value="attention.v_proj",
    mlp_inputs="mlp.fc1",
    mlp_output="mlp.fc2",
    mlp_norm="layernorm_after",
    norm_subtracts_mean=True,
    exclude_layers_name=("*patch_embeddings*", "*pooler.dense", "classifier", "decoder*"),
    fused=(("q_proj", "k_proj", "v_proj"),),
)

# Two towers; images pass theirs first.
CLIP = Architecture(
    model_type="clip",
    encoder_blocks="vision_model.encoder.layers",
    decoder_blocks="text_model.encoder.layers",
    embeddings="text_model.embeddings.token_embedding",
    final_norm="text_model.final_layer_norm",
    attention_inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_output="self_attn.out_proj",
    query_projections="self_attn.q_proj",
    key_projections="self_attn.k_proj",
    value_projections="self_attn.v_proj",
    key_norms=(),
    attention_norm="layer_norm1",
    attention_value="self_attn.v_proj",
    mlp_inputs="mlp.fc1",
    mlp_output="mlp.fc2",
    mlp_norm="layer_norm2",
    norm_subtracts_mean=True,
    position_embeddings="text_model.embeddings.position_embedding",
    exclude_layers_name=("*patch_embedding", "visual_projection", "text_projection", "classifier"),
    fused=(("q_proj", "k_proj", "v_proj"),),
)
SIGLIP = attrs.evolve(
    CLIP, model_type="siglip", exclude_layers_name=("*patch_embedding", "text_model.head", "vision_model.head*", "classifier")
)
