"""The checkpoints to damage. They contain the same small model: in one file, in shards, and quantized in
several ways."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from quark.checkpoint.destination import RUN_FILE
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate
from quark_tiny_model import held_out_text, tiny_model_dir

__all__ = ["FILES", "FLOAT", "QUANTIZED", "SIZES", "SOURCES", "TEXT", "build"]

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1024,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
"""Fields of the model's config.json."""

_COMMON = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
_LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "quantized": ("safetensors", {"scheme": "int4_wo_32"}),
    "nvfp4": ("safetensors", {"scheme": "nvfp4"}),
    "mxfp4": ("safetensors", {"scheme": "mxfp4"}),
    "fp8": ("safetensors", {"scheme": "fp8", "kv_cache_scheme": "fp8"}),
    "compressed-tensors": ("compressed_tensors", {"scheme": "int4_wo_32"}),
    "awq": ("awq", {"scheme": "uint4_wo_32"}),
}
"""The exporter and the scheme of each quantized source."""
FILES: dict[str, tuple[str, ...]] = {
    "float": (*_COMMON, "model.safetensors"),
    "sharded": (*_COMMON, "model.safetensors.index.json", "model-00001-of-00003.safetensors"),
    **dict.fromkeys(_LAYOUTS, (*_COMMON, "model.safetensors", RUN_FILE)),
}
"""The files of each source to damage."""
SOURCES = tuple(FILES)
FLOAT, QUANTIZED = ("float", "sharded"), tuple(_LAYOUTS)
TEXT = "text.txt"


def build(base: Path) -> None:
    """Write the sources, and a text for calibration, to a directory."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES), dtype=torch.bfloat16)
    model.save_pretrained(base / "float")
    model.save_pretrained(base / "sharded", max_shard_size="70KB")
    for directory, name in ((d, n) for d in ("float", "sharded") for n in ("tokenizer.json", "tokenizer_config.json")):
        shutil.copy(tiny_model_dir() / name, base / directory / name)
    (base / TEXT).write_text(held_out_text()[:3000], encoding="utf-8")
    data = [torch.arange(i, i + 40)[None] for i in (3, 50)]
    for name, (exporter, choices) in _LAYOUTS.items():
        quantize_checkpoint(base / "float", base / name, LLMTemplate.get("llama").get_config(**choices), data, exporter=exporter)
