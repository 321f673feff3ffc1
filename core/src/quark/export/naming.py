"""Names of a layer's tensors in a checkpoint, and where they lie in a packed layer. Source: spec of the checkpoint format, §2 and §8.1."""

from __future__ import annotations

from quark.nn.packed import SLOTS

PREFIXES = {"weight": "weight", "bias": "bias", "input_tensors": "input", "output_tensors": "output"}
"""Field of a `QLayerConfig` → first word of its tensors' names."""

_ATTRIBUTES = {prefix: SLOTS[slot] for slot, prefix in PREFIXES.items()}


def checkpoint_name(layer: str, slot: str, suffix: str) -> str:
    """Full name of a tensor: ``model.layers.0.mlp.up_proj`` + weight + scale → ``….up_proj.weight_scale``."""
    return f"{layer}.{PREFIXES[slot]}_{suffix}" if suffix else f"{layer}.{PREFIXES[slot]}"


def packed_attribute(name: str) -> str:
    """Path of a checkpoint tensor inside its packed layer: ``weight_scale`` → ``weight_quantizer.scale``; others stay."""
    prefix, _, suffix = name.partition("_")
    return f"{_ATTRIBUTES[prefix]}.{suffix}" if suffix and prefix in _ATTRIBUTES else name
