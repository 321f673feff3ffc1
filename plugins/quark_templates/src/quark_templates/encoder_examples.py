"""Tiny encoder models with random weights, and their example inputs."""

from __future__ import annotations

from typing import Any

from torch import nn

_TEXT: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_RELATIVE = {"relative_attention": True, "position_biased_input": False, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16}
_IMAGES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 8}
_T5 = {
    **{"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    **{"decoder_start_token_id": 0, "pad_token_id": 0},
}
_BART = {
    **{"vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4},
    **{"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2},
}
_FRAMES = {
    **{"conv_dim": (32, 32), "conv_kernel": (4, 4), "conv_stride": (4, 4), "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
}
_TOWERS = {"text_config": _TEXT, "vision_config": _IMAGES}
_CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", _TEXT),
    "roberta": ("RobertaForMaskedLM", _TEXT),
    "xlm-roberta": ("XLMRobertaForMaskedLM", _TEXT),
    "deberta": ("DebertaForMaskedLM", {**_TEXT, **_RELATIVE}),
    "deberta-v2": ("DebertaV2ForMaskedLM", {**_TEXT, **_RELATIVE}),
    "modernbert": ("ModernBertForMaskedLM", _TEXT),
    "t5": ("T5ForConditionalGeneration", _T5),
    "mt5": ("MT5ForConditionalGeneration", {**_T5, "feed_forward_proj": "gated-gelu"}),
    "umt5": ("UMT5ForConditionalGeneration", {**_T5, "feed_forward_proj": "gated-gelu"}),
    "bart": ("BartForConditionalGeneration", _BART),
    "whisper": ("WhisperForConditionalGeneration", {**_BART, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32}),
    "wav2vec2": ("Wav2Vec2ForCTC", {**_TEXT, **_FRAMES}),
    "vit": ("ViTForImageClassification", {**_IMAGES, "num_labels": 8}),
    "clip": ("CLIPModel", {**_TOWERS, "projection_dim": 32}),
    "siglip": ("SiglipModel", _TOWERS),
}


def tiny_encoder(model_type: str) -> nn.Module:
    """Return a tiny model of a family, in float32 and in evaluation mode.

    If token ids are not enough for a forward pass, the attribute ``example_inputs`` of the model has all
    arguments.
    """
    import torch
    import transformers

    name, sizes = _CLASSES[model_type]
    kind: Any = getattr(transformers, name)
    model = kind._from_config(kind.config_class(**sizes), dtype=torch.float32).eval()
    model.requires_grad_(False)  # as after reading a checkpoint: torch chooses other kernels for trainable parameters
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15 + float(parameter.ndim == 1))
    ids = torch.arange(3, 63).reshape(3, 20)
    given = {
        "input_ids": ids,
        "decoder_input_ids": ids + 1,
        "input_values": torch.randn(3, 400, generator=generator),
        "input_features": torch.randn(3, 8, 32, generator=generator),
        "pixel_values": torch.randn(3, 3, 16, 16, generator=generator),
    }
    names = [model.main_input_name, *(["decoder_input_ids"] if model.config.is_encoder_decoder else [])]
    if "text_config" in sizes:
        names = ["input_ids", "pixel_values"]
    if names != ["input_ids"]:
        model.example_inputs = {name: given[name] for name in names}
    tiny: nn.Module = model
    return tiny
