"""Quantized KV cache and attention, as outputs of projections; decided on patterns, without a model.

A template knows patterns, not layers. It adds an entry for a whole pattern. A user's own pattern may cover
all, some or none of the layers of that pattern. The first match counts: layers that the user's pattern covers
keep the user's entry, and the added entry is for the others. So the added entry may be based on the user's
entry only if the user's pattern covers *every* layer of the projection.
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
    """Return whether ``pattern`` matches every name that the pattern ``symbolic`` stands for.

    This is exact if ``pattern`` has no wildcards but ``*``: its stars may match anything in ``symbolic``,
    including stars. A pattern with other wildcards is assumed to cover only itself.

    >>> keys = "model.layers.*.self_attn.k_proj"
    >>> covers("*self_attn*", keys), covers("model.layers.0.*", keys)
    (True, False)
    """
    return pattern == symbolic or (not set("?[") & set(pattern) and fnmatchcase(symbolic, pattern))


def with_quantized_cache(config: QConfig, patterns: Sequence[str], spec: TensorSpec, architecture: Architecture | None) -> QConfig:
    """Return the configuration with quantized outputs of the key and value projections, which feed the cache.

    Excluded projections keep float weights and inputs. `quark.models.plan.rules` takes the outputs from
    ``kv_cache_quant_config``. The same entries are in ``layer_quant_config``, because AMD Quark's
    documentation has both, and programs and checkpoints read either.
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
    """Return the configuration with quantized attention probabilities and outputs of query projections.

    Excluded projections stay as they are.
    """
    config = attrs.evolve(config, softmax_quant_spec=spec)
    for pattern in patterns:
        base = base_for(config, pattern, architecture)
        if base is not None:
            config = _put_before_cover(config, pattern, attrs.evolve(base, output_tensors=spec), architecture)
    return config


def base_for(config: QConfig, pattern: str, architecture: Architecture | None) -> QLayerConfig | None:
    """Return the current configuration of the layers behind ``pattern``; None if all are excluded.

    It comes from the first per-layer pattern that covers every such layer; otherwise from linear layers that
    no pattern matches.
    """
    if _covering(config.exclude, pattern, architecture) is not None:
        return None
    cover = _covering(config.layer_quant_config, pattern, architecture)
    return _remaining(config) if cover is None else config.layer_quant_config[cover]


def _symbolic_names(pattern: str, architecture: Architecture | None) -> tuple[str, ...]:
    """Return the projections that ``pattern`` means, with ``*`` for the number of the block.

    If the family is not known, return the pattern itself.
    """
    if architecture is None or architecture.decoder_blocks is None:
        return (pattern,)
    names = (f"{architecture.decoder_blocks}.*.{projection}" for projection in architecture.attention_inputs)
    return tuple(name for name in names if fnmatchcase(name, pattern)) or (pattern,)


def _covering(patterns: Iterable[str], pattern: str, architecture: Architecture | None) -> str | None:
    """Return the first of the patterns that covers every layer behind ``pattern``."""
    symbolic = _symbolic_names(pattern, architecture)
    return next((p for p in patterns if covers(p, pattern) or all(covers(p, name) for name in symbolic)), None)


def _remaining(config: QConfig) -> QLayerConfig:
    """Return the configuration of linear layers that no pattern matches: of their type, or the global one."""
    for key, layer in config.layer_type_quant_config.items():
        if (key if isinstance(key, str) else key.__name__) == _PROJECTION_TYPE:
            return layer
    return config.global_quant_config


def _put_before_cover(config: QConfig, pattern: str, layer: QLayerConfig, architecture: Architecture | None) -> QConfig:
    """Return the configuration with an entry for ``pattern`` in front of the first pattern that covers it.

    After that pattern, which is the user's, the entry would never be reached.
    """
    cover = _covering(config.layer_quant_config, pattern, architecture)
    entries = list(config.layer_quant_config.items())
    if cover is None or cover == pattern:
        return attrs.evolve(config, layer_quant_config=dict(entries) | {pattern: layer})
    at = list(config.layer_quant_config).index(cover)
    return attrs.evolve(config, layer_quant_config=dict([*entries[:at], (pattern, layer), *entries[at:]]))
