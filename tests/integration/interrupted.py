"""Runs from disk of a tiny random model that fail after some block, for the tests of resumed runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from quark.config.model import QConfig
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate
from quark_devkit.whole_runs import interrupted_behind

__all__ = [
    "BLOCKS",
    "CASES",
    "DATA",
    "STATIC",
    "checkpoint",
    "config",
    "files",
    "left_behind",
    "partial_of",
]

DATA = [torch.arange(3, 40)[None], torch.arange(20, 50)[None]]
BLOCKS = 3
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "head_dim": 16,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
STATIC = {"scheme": "fp8", "kv_cache_scheme": "fp8"}
CASES: dict[str, dict[str, Any]] = {
    "round to nearest": {"scheme": "int4_wo_32"},
    "gptq": {"scheme": "int4_wo_32", "algorithm": "gptq"},
    "a float forward beside it": {"scheme": "int4_wo_32", "algorithm": "gptaq"},
    "awq": {"scheme": "int4_wo_32", "algorithm": "awq"},
    "awq and gptq": {"scheme": "int4_wo_32", "algorithm": ["awq", "gptq"]},
    "branches": {"scheme": "int4_wo_32", "algorithm": "lqer"},
    "gptq and branches": {"scheme": "int4_wo_32", "algorithm": ["gptq", "lqer"]},
    "awq and a float forward": {"scheme": "int4_wo_32", "algorithm": ["awq", "gptaq"]},
    "static activations and cache": STATIC,
    "a transform before static activations": {"scheme": "int8", "algorithm": "smoothquant"},
    "static activations, cache and attention, with gptq": {
        **STATIC,
        "algorithm": "gptq",
        "attention_scheme": "fp8",
        "kv_cache_post_rope": True,
    },
    "a cache with scales of heads, with gptq": {"scheme": "fp8", "kv_cache_scheme": "fp8_per_head", "algorithm": "gptq"},
    "a rotation": {"scheme": "int4_wo_32", "algorithm": "rotation"},
    "a rotation before gptq": {"scheme": "int4_wo_32", "algorithm": ["rotation", "gptq"]},
    "two levels of scales": {"scheme": "nvfp4", "algorithm": "gptq"},
}


def config(name: str = "round to nearest", family: str = "llama") -> QConfig:
    return LLMTemplate.get(family).get_config(**CASES[name])


def checkpoint(directory: Path, family: str = "llama", **more: Any) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | more), dtype=torch.bfloat16)
    model.save_pretrained(directory)
    return directory


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def partial_of(out: Path) -> Path:
    (partial,) = out.parent.glob(f".{out.name}.*.partial")
    return partial


def left_behind(source: Path, out: Path, name: str = "round to nearest", block: int = 2, **more: Any) -> Path:
    """Return the partial directory of a run that fails after ``block`` blocks."""
    with interrupted_behind(block):
        quantize_checkpoint(source, out, config(name), DATA, **more)
    return partial_of(out)
