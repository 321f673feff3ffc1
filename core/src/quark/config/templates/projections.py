"""Which quantization query, key and value projections have before their outputs are quantized too; decided on patterns, without a model.

A template knows patterns, not layers. The entries it adds for caches and attention stand for whole patterns,
while a user's own patterns may cover all, some or none of the layers behind one. Layers that a user's earlier
pattern matches keep it (first match); the added entry is for the rest, so its base may come from a user's
pattern only where that one covers *every* layer of the projection.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

import attrs

from quark.config.architecture import Architecture
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig

__all__ = ["base_for", "covering_pattern", "covers", "is_excluded", "put_before_cover", "remaining", "symbolic_names"]

_PROJECTION_TYPE = "Linear"


def covers(pattern: str, symbolic: str) -> bool:
    """Return whether ``pattern`` matches every name that the pattern ``symbolic`` stands for.

    Exact where ``pattern`` has no wildcards but ``*``: what its stars swallow of ``symbolic``, stars
    included, may be anything. Patterns with other wildcards are taken to cover only themselves.

    >>> covers("*self_attn*", "model.layers.*.self_attn.k_proj"), covers("model.layers.0.*", "model.layers.*.self_attn.k_proj")
    (True, False)
    """
    return pattern == symbolic or (not set("?[") & set(pattern) and fnmatchcase(symbolic, pattern))


def symbolic_names(pattern: str, architecture: Architecture | None) -> tuple[str, ...]:
    """Return the projections that ``pattern`` means, ``*`` for the block's number; the pattern itself where the family is not known."""
    if architecture is None or architecture.decoder_blocks is None:
        return (pattern,)
    names = (f"{architecture.decoder_blocks}.*.{projection}" for projection in architecture.attention_inputs)
    return tuple(name for name in names if fnmatchcase(name, pattern)) or (pattern,)


def is_excluded(config: QConfig, pattern: str, symbolic: tuple[str, ...]) -> bool:
    """Return whether every layer behind ``pattern`` is excluded."""
    return any(covers(e, pattern) or all(covers(e, name) for name in symbolic) for e in config.exclude)


def covering_pattern(config: QConfig, pattern: str, symbolic: tuple[str, ...]) -> str | None:
    """Return the first of the per-layer patterns that covers every layer behind ``pattern``."""
    return next((p for p in config.layer_quant_config if covers(p, pattern) or all(covers(p, name) for name in symbolic)), None)


def remaining(config: QConfig) -> QLayerConfig:
    """Return what a linear layer gets that no pattern matches: its type's configuration, or the global one."""
    for key, layer in config.layer_type_quant_config.items():
        if (key if isinstance(key, str) else key.__name__) == _PROJECTION_TYPE:
            return layer
    return config.global_quant_config


def base_for(config: QConfig, pattern: str, architecture: Architecture | None) -> QLayerConfig | None:
    """Return what the layers behind ``pattern`` have already, as far as it is the same for all of them; None where all are excluded."""
    symbolic = symbolic_names(pattern, architecture)
    if is_excluded(config, pattern, symbolic):
        return None
    cover = covering_pattern(config, pattern, symbolic)
    return remaining(config) if cover is None else config.layer_quant_config[cover]


def put_before_cover(config: QConfig, pattern: str, layer: QLayerConfig, architecture: Architecture | None) -> QConfig:
    """Return the configuration with an entry for ``pattern`` in front of the first user's pattern that covers it: so it is reached."""
    cover = covering_pattern(config, pattern, symbolic_names(pattern, architecture))
    entries = list(config.layer_quant_config.items())
    if cover is None or cover == pattern:
        return attrs.evolve(config, layer_quant_config=dict(entries) | {pattern: layer})
    at = list(config.layer_quant_config).index(cover)
    return attrs.evolve(config, layer_quant_config=dict([*entries[:at], (pattern, layer), *entries[at:]]))
