"""Functions that express a quantized KV cache and quantized attention as quantized outputs of projections.

The functions work on patterns of names, because a template has no model. They add an entry for the pattern of
a projection to a configuration. A pattern of the user may match all, some or none of the layers of this
projection. The first pattern that matches a layer counts. So the layers that the user's pattern matches keep
the user's entry, and the added entry applies to the other layers. Therefore the added entry can be a copy of
the user's entry only if the user's pattern matches *every* layer of the projection.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import attrs

from quark.config.architecture import Architecture
from quark.config.layer import QLayerConfig, TensorSpec
from quark.config.model import QConfig
from quark.config.tensor import QTensorConfig

_PROJECTION_TYPE = "Linear"


def covers(pattern: str, symbolic: str) -> bool:
    """Return whether ``pattern`` matches every name that the pattern ``symbolic`` matches.

    The result is exact if ``*`` is the only wildcard in ``pattern``, because a star in ``pattern`` can match
    a star in ``symbolic``. If ``pattern`` has other wildcards, the result is True only if both patterns are
    equal.

    >>> keys = "model.layers.*.self_attn.k_proj"
    >>> covers("*self_attn*", keys), covers("model.layers.0.*", keys)
    (True, False)
    """
    return pattern == symbolic or (not set("?[") & set(pattern) and fnmatchcase(symbolic, pattern))


def with_quantized_cache(config: QConfig, patterns: Sequence[str], spec: TensorSpec, architecture: Architecture | None) -> QConfig:
    """Return a copy of ``config`` in which the outputs of key and value projections are quantized.

    These outputs enter the KV cache. Excluded projections keep float weights and inputs.
    `quark.models.plan.rules` reads the quantization of the outputs from ``kv_cache_quant_config``. The same
    entries are added to ``layer_quant_config``, because AMD Quark's documentation sets both fields, and some
    programs read only one of them.
    """
    for pattern in patterns:
        base = base_for(config, pattern, architecture) or QLayerConfig()
        layer = QLayerConfig(input_tensors=base.input_tensors, weight=base.weight, output_tensors=spec)
        config = attrs.evolve(
            config,
            kv_cache_quant_config=config.kv_cache_quant_config | {pattern: layer},
            layer_quant_config=config.layer_quant_config | {pattern: attrs.evolve(layer)},
        )
    return config


def with_quantized_attention(config: QConfig, patterns: Sequence[str], spec: QTensorConfig, architecture: Architecture | None) -> QConfig:
    """Return a copy of ``config`` with quantized attention.

    The attention probabilities and the outputs of query projections are quantized. Excluded projections stay
    float.
    """
    config = attrs.evolve(config, softmax_quant_spec=spec)
    for pattern in patterns:
        base = base_for(config, pattern, architecture)
        if base is not None:
            config = _put_before_cover(config, pattern, attrs.evolve(base, output_tensors=spec), architecture)
    return config


def base_for(config: QConfig, pattern: str, architecture: Architecture | None) -> QLayerConfig | None:
    """Return the current configuration of the layers that ``pattern`` matches, or None if all are excluded.

    The result is the value of the first pattern in ``layer_quant_config`` that matches all these layers. If
    there is no such pattern, the result is the configuration of linear layers that no pattern matches.
    """
    if _covering(config.exclude, pattern, architecture) is not None:
        return None
    cover = _covering(config.layer_quant_config, pattern, architecture)
    return _remaining(config) if cover is None else config.layer_quant_config[cover]


def _symbolic_names(pattern: str, architecture: Architecture | None) -> tuple[str, ...]:
    """Return the names of the attention projections that ``pattern`` matches.

    The names contain ``*`` in place of the block number. If the family is unknown, or has no such
    projections, return only ``pattern`` itself.
    """
    if architecture is None or architecture.decoder_blocks is None:
        return (pattern,)
    names = (f"{architecture.decoder_blocks}.*.{projection}" for projection in architecture.attention_inputs)
    return tuple(name for name in names if fnmatchcase(name, pattern)) or (pattern,)


def _covering(patterns: Iterable[str], pattern: str, architecture: Architecture | None) -> str | None:
    """Return the first of ``patterns`` that matches every layer that ``pattern`` matches, or None."""
    symbolic = _symbolic_names(pattern, architecture)
    return next((p for p in patterns if covers(p, pattern) or all(covers(p, name) for name in symbolic)), None)


def _remaining(config: QConfig) -> QLayerConfig:
    """Return the configuration of linear layers that no pattern matches.

    The result is the entry for the type of these layers, or the global configuration if there is no entry.
    """
    for key, layer in config.layer_type_quant_config.items():
        if (key if isinstance(key, str) else key.__name__) == _PROJECTION_TYPE:
            return layer
    return config.global_quant_config


def _put_before_cover(config: QConfig, pattern: str, layer: QLayerConfig, architecture: Architecture | None) -> QConfig:
    """Return a copy of ``config`` with a new entry for ``pattern`` in ``layer_quant_config``.

    The new entry is in front of the first pattern that matches all layers of ``pattern``. That pattern comes
    from the user. An entry after it would have no effect, because the first pattern that matches counts.
    """
    cover = _covering(config.layer_quant_config, pattern, architecture)
    entries = list(config.layer_quant_config.items())
    if cover is None or cover == pattern:
        return attrs.evolve(config, layer_quant_config=dict(entries) | {pattern: layer})
    at = list(config.layer_quant_config).index(cover)
    return attrs.evolve(config, layer_quant_config=dict([*entries[:at], (pattern, layer), *entries[at:]]))
