"""What a GGUF file says of its model: sizes, rotary embedding, what made it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quark.base.version import VERSION
from quark.config.model import QConfig
from quark.errors import UnsupportedError
from quark_exporters.gguf_layout.families import Family

if TYPE_CHECKING:
    from gguf import GGUFWriter

__all__ = ["head_dim", "rotary_factors", "write_metadata"]

_ROPE_KINDS = {"default": None, "llama3": None, "linear": "linear", "yarn": "yarn"}
"""Kinds of rotary embedding → name in GGUF; that of Llama 3 is a tensor of factors instead."""


def write_metadata(writer: GGUFWriter, config: Any, family: Family, quantization: QConfig, file_type: int) -> None:
    """Write the keys that llama.cpp needs to build the model.

    Args:
        writer: Of the GGUF file.
        config: The configuration of the text model, as transformers has it.
        family: The model's.
        quantization: Kept as JSON under ``quark.quantization_config``, for people.
        file_type: A `gguf.LlamaFileType`.

    Raises:
        UnsupportedError: The rotary embedding is of a kind that GGUF has no key for.
    """
    rope = _rope(config)
    writer.add_type("model")
    if getattr(config, "name_or_path", ""):
        writer.add_name(str(config.name_or_path).rstrip("/").rpartition("/")[2])
    writer.add_file_type(file_type)
    writer.add_quantization_version(2)
    writer.add_quantized_by(f"quark {VERSION}")
    writer.add_string("quark.quantization_config", json.dumps(quantization.to_dict(), sort_keys=True))
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim(config))
    writer.add_value_length(head_dim(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim(config))
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    if family.has_experts:
        writer.add_expert_count(_first(config, "num_local_experts", "num_experts"))
        writer.add_expert_used_count(config.num_experts_per_tok)
        if hasattr(config, "moe_intermediate_size"):
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if (kind := _ROPE_KINDS[rope.get("rope_type", "default")]) is not None:
        writer.add_string(f"{family.architecture}.rope.scaling.type", kind)
        writer.add_rope_scaling_factor(float(rope["factor"]))
        if "original_max_position_embeddings" in rope:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def head_dim(config: Any) -> int:
    """Return the number of elements of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rotary_factors(config: Any) -> Tensor | None:
    """Return by what Llama 3 divides each frequency of its rotary embedding, float32 ``[head_dim / 2]``; None for other kinds.

    Source: Llama 3.1's reference code; llama.cpp reads them as ``rope_freqs.weight``.
    """
    rope = _rope(config)
    if rope.get("rope_type", "default") != "llama3":
        return None
    frequencies = rope["rope_theta"] ** -(torch.arange(0, head_dim(config), 2, dtype=torch.float32) / head_dim(config))
    wavelengths = 2 * torch.pi / frequencies
    low, high, context = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    smooth = ((context / wavelengths - low) / (high - low)).clamp(0, 1)  # 0: long waves, divided; 1: short ones, left as they are
    return 1 / ((1 - smooth) / rope["factor"] + smooth)


def _rope(config: Any) -> dict[str, Any]:
    rope = dict(getattr(config, "rope_parameters", None) or {})
    kind = rope.get("rope_type", "default")
    if kind not in _ROPE_KINDS:
        raise UnsupportedError(f"GGUF files are written for the rotary embeddings {', '.join(_ROPE_KINDS)}, and this model has '{kind}'")
    return rope


def _first(config: Any, *names: str) -> int:
    return int(next(getattr(config, name) for name in names if hasattr(config, name)))
