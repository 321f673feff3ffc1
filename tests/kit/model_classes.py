"""Model classes of transformers, with tiny configurations and inputs: heads, encoders, images, speech."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

__all__ = ["MODEL_CLASSES", "inputs_of", "random_model"]

_TEXT = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_DECODER = {**_TEXT, "num_key_value_heads": 2, "head_dim": 8}
_BEHIND_ENCODER = {
    **{"vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4},
    **{"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2},
}
_T5 = {
    **{"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    **{"decoder_start_token_id": 0, "pad_token_id": 0},
}
_IMAGE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 8}
_SPEECH = {
    **_TEXT,
    **{"conv_dim": (32, 32), "conv_kernel": (4, 4), "conv_stride": (4, 4), "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
}
_WHISPER = {**_BEHIND_ENCODER, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}
_RELATIVE = {"relative_attention": True, "position_biased_input": False, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16}
_IMAGE_AND_TEXT = {"text_config": _TEXT, "vision_config": _IMAGE}
_GPT2 = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MODEL_CLASSES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("Qwen3ForCausalLM", "Qwen3Model", "Qwen3ForSequenceClassification", "Qwen3ForTokenClassification"), _DECODER),
    **dict.fromkeys(("LlamaModel", "LlamaForSequenceClassification", "LlamaForQuestionAnswering"), _DECODER),
    **dict.fromkeys(("MistralModel", "Gemma2ForSequenceClassification"), _DECODER),
    **dict.fromkeys(("GPT2ForSequenceClassification", "GPT2Model"), _GPT2),
    **dict.fromkeys(("BertModel", "BertForMaskedLM", "BertForSequenceClassification", "BertForQuestionAnswering"), _TEXT),
    **dict.fromkeys(("RobertaForSequenceClassification", "XLMRobertaModel", "XLMRobertaForTokenClassification"), _TEXT),
    "DebertaForSequenceClassification": {**_TEXT, **_RELATIVE},
    "DebertaV2ForTokenClassification": {**_TEXT, **_RELATIVE},
    **dict.fromkeys(("ModernBertForMaskedLM", "ModernBertForSequenceClassification"), _TEXT),
    "AlbertForSequenceClassification": {**_TEXT, "embedding_size": 32},
    "DistilBertModel": {"vocab_size": 64, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64},
    **dict.fromkeys(("T5ForConditionalGeneration", "T5EncoderModel", "T5ForSequenceClassification"), _T5),
    **dict.fromkeys(("BartForConditionalGeneration", "BartModel", "BartForSequenceClassification"), _BEHIND_ENCODER),
    **dict.fromkeys(("PegasusForConditionalGeneration", "MarianMTModel"), _BEHIND_ENCODER),
    **dict.fromkeys(("WhisperForConditionalGeneration", "WhisperModel", "WhisperForAudioClassification"), _WHISPER),
    **dict.fromkeys(("ViTForImageClassification", "ViTModel"), _IMAGE),
    **dict.fromkeys(("CLIPModel", "CLIPVisionModelWithProjection", "CLIPTextModelWithProjection"), _IMAGE_AND_TEXT),
    **dict.fromkeys(("SiglipModel", "SiglipForImageClassification"), _IMAGE_AND_TEXT),
    **dict.fromkeys(("Wav2Vec2ForCTC", "Wav2Vec2Model", "Wav2Vec2ForSequenceClassification"), _SPEECH),
}
"""Configuration values by class."""


def random_model(name: str) -> nn.Module:
    """Return a tiny model of a class, of random weights."""
    kind = getattr(transformers, name)
    values = MODEL_CLASSES[name]
    part = {"CLIPVisionConfig": "vision_config", "CLIPTextConfig": "text_config"}.get(kind.config_class.__name__)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(kind.config_class(**(values if part is None else values[part]))).eval().requires_grad_(False)


def inputs_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the inputs of a forward by name: the main input, and inputs of a decoder or a second tower."""
    config: Any = model.config
    name, main, generator = type(model).__name__, str(model.main_input_name), torch.Generator().manual_seed(0)
    given = {
        "pixel_values": torch.randn(1, 3, 16, 16, generator=generator),
        "input_values": torch.randn(1, 400, generator=generator),
        "input_features": torch.randn(1, 8, 32, generator=generator),
        "input_ids": torch.tensor([[5, 6, 7, 8, 9, config.eos_token_id or 2]]) if "Sequence" in name else torch.arange(3, 19)[None],
    }
    names = [main]
    if hasattr(config, "vision_config") and "Image" not in name:
        names = ["input_ids", "pixel_values"]
    inputs = {name: given[name] for name in names}
    if config.is_encoder_decoder and not any(kind in name for kind in ("Encoder", "Audio", "Sequence")):
        inputs["decoder_input_ids"] = torch.arange(4, 12)[None]
    return inputs
