"""Functions that write the metadata of a GGUF file, such as model family, sizes and rotary embedding."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from quark.base.version import VERSION
from quark.config.model import QConfig
from quark.errors import UnsupportedError

if TYPE_CHECKING:
    from gguf import GGUFWriter

__all__ = ["FAMILIES", "Family", "family_of", "head_dim", "rotary_factors", "write_metadata"]


@attrs.frozen(kw_only=True)
class Family:
    """A family of models that GGUF supports.

    Attributes:
        architecture: Name of the family in ``general.architecture``.
        rotates_pairs: Whether the rotary embedding in llama.cpp rotates the pairs of channels (0, 1), (2, 3),
            … of a head. In transformers, it rotates the pairs (0, d/2), (1, d/2 + 1), … of the d channels. If
            llama.cpp differs, the rows of query and key projections are reordered.
        has_experts: Whether the feed-forward layers are mixtures of experts.
        required: Settings of the transformers configuration with the values that llama.cpp assumes for this
            architecture. A GGUF file cannot store other values of these settings.
    """

    architecture: str
    rotates_pairs: bool = False
    has_experts: bool = False
    required: Mapping[str, Any] = attrs.field(factory=lambda: {"hidden_act": "silu"})


FAMILIES = {
    "llama": Family(architecture="llama", rotates_pairs=True),
    "mistral": Family(architecture="llama", rotates_pairs=True),
    "mixtral": Family(architecture="llama", rotates_pairs=True, has_experts=True),
    "qwen2": Family(architecture="qwen2", required={"hidden_act": "silu", "use_sliding_window": False}),
    "qwen3": Family(architecture="qwen3"),
    "qwen3_moe": Family(architecture="qwen3moe", has_experts=True, required={"hidden_act": "silu", "norm_topk_prob": True}),
}
"""Maps the ``model_type`` of a configuration to the family.

Source: ``convert_hf_to_gguf.py`` of llama.cpp.
"""


def family_of(config: Any) -> Family:
    """Return the family of a model.

    Args:
        config: Configuration of the text model in transformers.

    Raises:
        UnsupportedError: No family has this ``model_type``, or a setting does not have the value that the
            family requires.
    """
    if config.model_type not in FAMILIES:
        raise UnsupportedError(
            f"the GGUF exporter supports the families {', '.join(FAMILIES)}, not '{config.model_type}'. Export as safetensors"
        )
    family = FAMILIES[config.model_type]
    for name, value in family.required.items():
        if getattr(config, name, value) != value:
            raise UnsupportedError(
                f"GGUF runtimes compute the architecture '{family.architecture}' with {name}={value!r}, but this model has "
                f"{getattr(config, name)!r}. Export as safetensors"
            )
    return family


_ROPE_KINDS = {"default": None, "llama3": None, "linear": "linear", "yarn": "yarn"}
"""Maps each kind of rotary embedding to its name in GGUF.

None means that GGUF needs no name. For Llama 3, the file has a tensor of factors instead.
"""


def write_metadata(writer: GGUFWriter, config: Any, family: Family, quantization: QConfig, file_type: int) -> None:
    """Write the keys that llama.cpp needs to build the model.

    Args:
        writer: Writer of the GGUF file.
        config: Configuration of the text model in transformers.
        family: Family of the model.
        quantization: Quantization of the model, written as JSON under ``quark.quantization_config``.
            llama.cpp does not need this key.
        file_type: A value of `gguf.LlamaFileType`.

    Raises:
        UnsupportedError: GGUF has no key for this kind of rotary embedding.
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
        writer.add_expert_count(config.num_local_experts if hasattr(config, "num_local_experts") else config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if hasattr(config, "moe_intermediate_size"):
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if (kind := _ROPE_KINDS[rope.get("rope_type", "default")]) is not None:
        writer.add_string(f"{family.architecture}.rope.scaling.type", kind)
        writer.add_rope_scaling_factor(float(rope["factor"]))
        if "original_max_position_embeddings" in rope:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def head_dim(config: Any) -> int:
    """Return the number of channels in an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rotary_factors(config: Any) -> Tensor | None:
    """Return the numbers by which Llama 3 divides the frequencies of its rotary embedding.

    The result is float32 ``[head_dim / 2]``, which llama.cpp reads as ``rope_freqs.weight``. Return None for
    other kinds of rotary embedding.

    Source: reference code of Llama 3.1.
    """
    rope = _rope(config)
    if rope.get("rope_type", "default") != "llama3":
        return None
    frequencies = rope["rope_theta"] ** -(torch.arange(0, head_dim(config), 2, dtype=torch.float32) / head_dim(config))
    wavelengths = 2 * torch.pi / frequencies
    low, high, context = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    smooth = ((context / wavelengths - low) / (high - low)).clamp(
        0, 1
    )  # 0 for long waves, which are divided by the factor; 1 for short waves, which stay as they are
    return 1 / ((1 - smooth) / rope["factor"] + smooth)


def _rope(config: Any) -> dict[str, Any]:
    rope = dict(getattr(config, "rope_parameters", None) or {})
    kind = rope.get("rope_type", "default")
    if kind not in _ROPE_KINDS:
        raise UnsupportedError(
            f"the GGUF exporter supports the rotary embeddings {', '.join(_ROPE_KINDS)}, not '{kind}'. Export as safetensors"
        )
    return rope
