"""Write tiny checkpoints of vision and speech models, with random weights and processors."""

from __future__ import annotations

import json
import wave
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from quark_tiny_model import tiny_tokenizer

__all__ = [
    "CHATTING",
    "HEARING",
    "SEEING",
    "SPELLING",
    "media_checkpoint",
    "read_no_videos",
    "write_image",
    "write_images",
    "write_sound",
    "write_sounds",
]

_TEXT = {
    **{"vocab_size": 1040, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0},
}
_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
_MERGED = {
    **{"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32},
    **{"num_position_embeddings": 16, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0], "spatial_merge_size": 2},
}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
_QWEN = {"text_config": {**_TEXT, **_ROPE}, "image_token_id": 1024, "video_token_id": 1025, "vision_start_token_id": 1026}
_QWEN |= {"vision_end_token_id": 1027, "tie_word_embeddings": False}
_SPEECH = {
    **{"vocab_size": 1030, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2},
    **{"decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 8, "max_source_positions": 50},
    **{"max_target_positions": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 1028},
}

SEEING: dict[str, dict[str, Any]] = {
    "LlavaForConditionalGeneration": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_TOWER, "model_type": "clip_vision_model", "projection_dim": 32},
        "image_token_index": 1024,
        "vision_feature_layer": -1,
    },
    "Qwen2VLForConditionalGeneration": {**_QWEN, "vision_config": {**_MERGED, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}},
    "Qwen2_5_VLForConditionalGeneration": {**_QWEN, "vision_config": _MERGED},
    "Qwen3VLForConditionalGeneration": {**_QWEN, "vision_config": _MERGED},
    "Gemma3ForConditionalGeneration": {
        "text_config": _TEXT,
        "vision_config": {**_TOWER, "vision_use_head": False},
        "image_token_index": 1024,
        "boi_token_index": 1026,
        "eoi_token_index": 1027,
        "mm_tokens_per_image": 4,
    },
}
"""Configuration values of vision models, by class."""
HEARING: dict[str, dict[str, Any]] = {"WhisperForConditionalGeneration": _SPEECH}
"""Configuration values of speech recognition models, by class."""
CHATTING: dict[str, dict[str, Any]] = {
    "Qwen2AudioForConditionalGeneration": {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "audio_config": {
            **{"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "num_mel_bins": 8},
            "max_source_positions": 50,
        },
        "audio_token_index": 1030,
    }
}
"""Configuration values of chat models with audio inputs, by class."""
_LETTERS = {
    **{"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"conv_dim": (32, 32), "conv_kernel": (10, 40), "conv_stride": (8, 40), "num_feat_extract_layers": 2, "pad_token_id": 0},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
}
SPELLING: dict[str, dict[str, Any]] = {"Wav2Vec2ForCTC": _LETTERS, "HubertForCTC": _LETTERS}
"""Configuration values of models that predict a letter for each frame of speech (CTC), by class."""
_TOKENS = ["<image>", "<video>", "<see>", "<seen>", "<hear>", "<|en|>", "<|AUDIO|>"]
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' }}{% for part in message['content'] %}"
    "{{ 'MARK' if part['type'] == 'image' else part['text'] }}{% endfor %}{{ '\n' }}{% endfor %}"
)


def media_checkpoint(name: str, path: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Save a model of a class with its processor into a directory, and return the directory.

    Vision models need Pillow.
    """
    kind = getattr(transformers, name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(kind.config_class(**(SEEING | HEARING | CHATTING | SPELLING)[name]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.ndim > 1 else 1)
    if name in HEARING:
        model.generation_config.update(max_length=40, bos_token_id=0)
    model.to(dtype).save_pretrained(path)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(_TOKENS, special_tokens=True)
    _save_processor(name, tokenizer, path)
    return path


def _save_processor(name: str, tokenizer: Any, path: Path) -> None:
    """Save the files of a processor, as a published model has them."""
    if name in SPELLING:
        extractor = transformers.Wav2Vec2FeatureExtractor()
        transformers.Wav2Vec2Processor(extractor, _speller(path)).save_pretrained(path)
        return
    if name in HEARING:
        tokenizer.save_pretrained(path)
        transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(path)
        _write(path / "preprocessor_config.json", json.loads((path / "preprocessor_config.json").read_text()))
        return
    if name in CHATTING:
        extractor = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
        transformers.Qwen2AudioProcessor(extractor, tokenizer).save_pretrained(path)
        return
    is_gemma, is_qwen = name.startswith("Gemma3"), name.startswith("Qwen")
    marks = {"image_token": "<image>", "boi_token": "<see>", "eoi_token": "<seen>", "video_token": "<video>"}
    for key, token in marks.items():
        tokenizer._set_model_specific_special_tokens({key: token})
    tokenizer.chat_template = _TEMPLATE.replace("MARK", "<see>" if is_gemma else "<image>")
    tokenizer.save_pretrained(path)
    size: dict[str, Any] = {"size": {"height": 16, "width": 16}}
    if is_qwen:
        sizes = {"min_pixels": 64, "max_pixels": 256, "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
        of_processor = {"image_processor_type": "Qwen2VLImageProcessor", **sizes, "size": {"shortest_edge": 64, "longest_edge": 256}}
        _write(path / "video_preprocessor_config.json", {"video_processor_type": "Qwen2VLVideoProcessor", **sizes})
        of_whole: dict[str, Any] = {"processor_class": name.replace("ForConditionalGeneration", "Processor")}
    elif is_gemma:
        of_processor = {"image_processor_type": "Gemma3ImageProcessor", **size}
        of_whole = {"processor_class": "Gemma3Processor", "image_seq_length": 4}
    else:
        of_processor = {"image_processor_type": "CLIPImageProcessor", **size, "crop_size": {"height": 16, "width": 16}}
        of_whole = {"processor_class": "LlavaProcessor", "patch_size": 4, "num_additional_image_tokens": 1}
        of_whole["vision_feature_select_strategy"] = "default"
    _write(path / "preprocessor_config.json", of_processor | {"processor_class": of_whole["processor_class"]})
    _write(path / "processor_config.json", of_whole)


def _speller(path: Path) -> Any:
    """Return a tokenizer of capital letters, whose files are in a directory; token 0 is the blank."""
    names = ["<pad>", "<s>", "</s>", "<unk>", "|", "'", *map(chr, range(ord("A"), ord("Z") + 1))]
    _write(path / "vocab.json", {name: number for number, name in enumerate(names)})
    return transformers.Wav2Vec2CTCTokenizer(str(path / "vocab.json"))


def write_image(path: Path, seed: int = 0) -> Path:
    """Write a small image of random pixels, and return its path."""
    from PIL import Image

    pixels = torch.randint(256, (16, 16, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(path)
    return path


def write_images(folder: Path, count: int = 4, name: str = "images.jsonl") -> Path:
    """Write images, and chats about them as JSON lines; return the path of the chats."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        write_image(folder / f"pictures/{number}.png", number)
        question = [{"type": "image", "path": f"pictures/{number}.png"}, {"type": "text", "text": f"What is in picture {number}?"}]
        answer = f"The beginning of the world, and {number + 2} trees in a garden."
        rows.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
    return _write_rows(folder / name, rows)


def write_sound(path: Path, seed: int = 0, rate: int = 16_000, seconds: float = 0.5, channels: int = 1) -> Path:
    """Write a WAV file of noise, and return its path."""
    samples = torch.randn(int(rate * seconds) * channels, generator=torch.Generator().manual_seed(seed))
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 3000).clamp(-32768, 32767).to(torch.int16).numpy().tobytes())
    return path


def write_sounds(folder: Path, count: int = 4, name: str = "sounds.jsonl") -> Path:
    """Write sounds, and JSON lines with each sound and its words; return the path of the JSON lines."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        write_sound(folder / f"{number}.wav", number)
    return _write_rows(folder / name, [{"audio": f"{n}.wav", "text": f"In the beginning, {n + 2} birds sang."} for n in range(count)])


def _write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _write(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(dict(values)), encoding="utf-8")


def read_no_videos(patch: Any) -> None:
    """Let processors of Qwen's models load without torchvision, which they need only for videos.

    ``patch`` is pytest's ``monkeypatch``.
    """
    from transformers import ProcessorMixin
    from transformers.models.auto.video_processing_auto import AutoVideoProcessor

    check = ProcessorMixin.check_argument_for_proper_class

    def checked(self: Any, name: str, argument: Any) -> Any:
        return None if name == "video_processor" else check(self, name, argument)

    patch.setattr(AutoVideoProcessor, "from_pretrained", lambda *_, **__: None)
    patch.setattr(ProcessorMixin, "check_argument_for_proper_class", checked)
