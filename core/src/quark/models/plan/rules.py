"""Resolution of a layer's quantization by the rules of a configuration.

The order of precedence is defined only here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
from torch import nn

from quark.base.names import matches
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.models.layers.layer_types import is_by_name, is_lookup

__all__ = ["Resolution", "first_match", "layer_config_for", "resolution"]


@attrs.frozen
class Resolution:
    """The configuration of a layer and the rule that decided it.

    ``config`` is None where the layer stays float.
    """

    config: QLayerConfig | None
    reason: str


def first_match(name: str, patterns: object) -> str | None:
    """Return the first pattern that matches a module's full name, case-sensitively; None where none does."""
    return next((p for p in patterns if matches(name, p)), None)  # type: ignore[attr-defined]


def layer_config_for(config: QConfig, name: str, planned_as: type[nn.Module], has_cache: bool = True) -> Resolution:
    """Return the quantization of the layer ``name`` and the rule that decided it.

    Precedence: ``exclude``, then ``layer_quant_config`` (first matching pattern), then
    ``layer_type_quant_config`` (exact type), then ``global_quant_config``, which never applies to embeddings
    and other types that are quantized by name. A match in ``kv_cache_quant_config`` adds its output
    quantization to the result, even to an excluded layer.

    Args:
        config: Of the whole model.
        name: Full module name.
        planned_as: The class that the layer counts as.
        has_cache: Whether the layer is in a part of the model with a KV cache, which a pattern such as
            ``*v_proj`` does not tell: it also matches in a vision tower.
    """
    base = _without_cache(config, name, planned_as)
    if is_lookup(planned_as) and base.config is not None:
        # The input is indices, which cannot be quantized, and there is no bias: what else a scheme for linear
        # layers says applies.
        own = QLayerConfig(weight=base.config.weight, output_tensors=base.config.output_tensors)
        return Resolution(_or_float(own), base.reason)
    pattern = first_match(name, config.kv_cache_quant_config)
    output = config.kv_cache_quant_config[pattern].output_tensors if pattern is not None else None
    if pattern is None or output is None:
        return base
    if not has_cache:
        # Templates repeat the cache's output quantization under the same pattern in layer_quant_config.
        if base.config != config.kv_cache_quant_config[pattern]:
            return base
        return Resolution(_or_float(attrs.evolve(config.kv_cache_quant_config[pattern], output_tensors=None)), base.reason)
    layer = attrs.evolve(base.config or QLayerConfig(), output_tensors=output)
    return Resolution(layer, f"{base.reason}; cache: {pattern}")


def _without_cache(config: QConfig, name: str, planned_as: type[nn.Module]) -> Resolution:
    def is_type(key: type | str) -> bool:
        return key is planned_as or key == planned_as.__name__

    unless_named = ""
    if is_by_name(planned_as):
        unless_named = "embeddings stay float unless named" if is_lookup(planned_as) else f"{planned_as.__name__} stays float unless named"
    return resolution(config, (name,), is_type, planned_as.__name__, unless_named)


def resolution(
    config: QConfig, names: Sequence[str], is_type: Callable[[type | str], bool], type_name: str, unless_named: str = ""
) -> Resolution:
    """Return the quantization of a layer or an operator by the rules that do not concern the KV cache.

    Args:
        config: Of the whole model.
        names: The full name, and others by which patterns may name it.
        is_type: Whether a key of ``layer_type_quant_config`` is its type.
        type_name: Its type, for the reason.
        unless_named: Why the global configuration does not apply to it; empty where it does.
    """

    def match(patterns: object) -> str | None:
        return next((pattern for name in names if (pattern := first_match(name, patterns)) is not None), None)

    if (pattern := match(config.exclude)) is not None:
        return Resolution(None, f"excluded: {pattern}")
    if (pattern := match(config.layer_quant_config)) is not None:
        return Resolution(_or_float(config.layer_quant_config[pattern]), f"pattern: {pattern}")
    for key, layer in config.layer_type_quant_config.items():
        if is_type(key):
            return Resolution(_or_float(layer), f"type: {type_name}")
    if unless_named:
        return Resolution(None, unless_named)
    return Resolution(_or_float(config.global_quant_config), "global")


def _or_float(layer: QLayerConfig) -> QLayerConfig | None:
    """Return the layer configuration, or None where it quantizes nothing."""
    return None if layer == QLayerConfig() else layer
