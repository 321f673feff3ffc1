"""Families of models that GGUF files are written for: their architecture in GGUF, and what of it is particular."""

from __future__ import annotations

import attrs

from quark.errors import UnsupportedError

__all__ = ["FAMILIES", "Family", "family_of"]


@attrs.frozen(kw_only=True)
class Family:
    """A family of models in GGUF.

    Attributes:
        architecture: Name in ``general.architecture``.
        rotates_pairs: Whether its rotary embedding turns neighbouring elements (0, 1), (2, 3), … of a head, where transformers turns
            (0, d/2), (1, d/2 + 1), …: rows of query and key projections are then stored in that order.
        has_experts: Whether its feed-forward layers are mixtures of experts.
    """

    architecture: str
    rotates_pairs: bool = False
    has_experts: bool = False


FAMILIES = {
    "llama": Family(architecture="llama", rotates_pairs=True),
    "mistral": Family(architecture="llama", rotates_pairs=True),
    "mixtral": Family(architecture="llama", rotates_pairs=True, has_experts=True),
    "qwen2": Family(architecture="qwen2"),
    "qwen3": Family(architecture="qwen3"),
    "qwen3_moe": Family(architecture="qwen3moe", has_experts=True),
}
"""By ``model_type`` of the configuration. Source: ``convert_hf_to_gguf.py`` of llama.cpp."""


def family_of(model_type: str) -> Family:
    """Return the family of that ``model_type``.

    Raises:
        UnsupportedError: There is none.
    """
    if model_type not in FAMILIES:
        raise UnsupportedError(
            f"GGUF files are written for the families {', '.join(FAMILIES)}, and this model is of '{model_type}': export it as safetensors"
        )
    return FAMILIES[model_type]
