"""Families of models that GGUF files are written for: their architecture in GGUF, and what of it is particular."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from quark.errors import UnsupportedError

__all__ = ["FAMILIES", "Family", "family_of"]


@attrs.frozen(kw_only=True)
class Family:
    """A family of models in GGUF.

    Attributes:
        architecture: Name in ``general.architecture``.
        rotates_pairs: Whether its rotary embedding turns neighbouring elements (0, 1), (2, 3), … of a head,
            where transformers turns (0, d/2), (1, d/2 + 1), …: rows of query and key projections are then
            stored in that order.
        has_experts: Whether its feed-forward layers are mixtures of experts.
        required: Settings of transformers' configuration that the architecture implies, since a file cannot
            say otherwise.
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
"""By ``model_type`` of the configuration. Source: ``convert_hf_to_gguf.py`` of llama.cpp."""


def family_of(config: Any) -> Family:
    """Return the family of a model.

    Args:
        config: Of the text model, as transformers has it.

    Raises:
        UnsupportedError: There is none for its ``model_type``, or its settings are not those of the family.
    """
    if config.model_type not in FAMILIES:
        raise UnsupportedError(
            f"GGUF files are written for the families {', '.join(FAMILIES)}, and this model is of '{config.model_type}': export it as "
            "safetensors"
        )
    family = FAMILIES[config.model_type]
    for name, value in family.required.items():
        if getattr(config, name, value) != value:
            raise UnsupportedError(
                f"programs that run GGUF files compute every model of the architecture '{family.architecture}' with {name}={value!r}, and "
                f"this one has {getattr(config, name)!r}: export it as safetensors"
            )
    return family
