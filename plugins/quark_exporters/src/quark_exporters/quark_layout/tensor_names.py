"""Names of tensors in a checkpoint, and their paths in a prepared model. Source: checkpoints of AMD Quark 0.13."""

from __future__ import annotations

from collections.abc import Iterable

from quark.config.slot import Slot
from quark.hf.quark_loader import is_stored_beside_weight
from quark.modules.attention import PROBABILITIES

__all__ = ["attention_attribute", "checkpoint_name", "has_probabilities", "packed_attribute", "probabilities_name"]

_PROBABILITIES = "prob_output_"

_ATTRIBUTES = {slot.checkpoint_prefix: slot.quantizer_attribute for slot in Slot}


def checkpoint_name(layer: str, slot: Slot, suffix: str) -> str:
    """Return the full name of a tensor: ``model.layers.0.mlp.up_proj`` + weight + scale → ``….up_proj.weight_scale``."""
    return f"{layer}.{slot.checkpoint_prefix}_{suffix}" if suffix else f"{layer}.{slot.checkpoint_prefix}"


def probabilities_name(attention: str, suffix: str) -> str:
    """Return the full name of a tensor of attention probabilities: ``….self_attn`` + scale → ``….self_attn.prob_output_scale``."""
    return f"{attention}.{_PROBABILITIES}{suffix}"


def attention_attribute(name: str) -> str:
    """Return the path of a stored tensor in its attention module: ``prob_output_scale`` → ``prob_output_quantizer.scale``; others stay."""
    return f"{PROBABILITIES}.{name.removeprefix(_PROBABILITIES)}" if name.startswith(_PROBABILITIES) else name


def has_probabilities(names: Iterable[str]) -> bool:
    """Return whether tensors of attention probabilities are among these full names."""
    return any(name.rpartition(".")[2].startswith(_PROBABILITIES) for name in names)


def packed_attribute(name: str) -> str:
    """Return the path of a checkpoint tensor inside its packed layer: ``weight_scale`` → ``weight_quantizer.scale``; others stay."""
    prefix, _, suffix = name.partition("_")
    return f"{_ATTRIBUTES[prefix]}.{suffix}" if suffix and prefix in _ATTRIBUTES and not is_stored_beside_weight(suffix) else name
