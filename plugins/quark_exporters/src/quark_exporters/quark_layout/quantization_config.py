"""Functions that write and read the ``quantization_config`` of a checkpoint.

The written configuration has exact module names instead of patterns. Readers use the first pattern that
matches, but JSON writers sort keys, and exact names do not depend on the order. It never has null where a
reader expects a list or a dictionary. Source: AMD Quark 0.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import attrs

from quark.checkpoint import CheckpointContent, ExportOptions, StoredConfig
from quark.checkpoint.content import is_float, routers
from quark.checkpoint.provenance import KEY as PLUGINS
from quark.checkpoint.provenance import provenance
from quark.config.fields import strings_of, value_of
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.models.plan.mixtures import fused_mixtures
from quark.models.plan.plan_row import PlanRow
from quark.models.plan.quant_plan import QuantPlan
from quark.models.plan.rules import layer_config_for
from quark.plugins import layer_types

__all__ = ["quantization_config", "read_quantization_config"]

_VLLM_QUERIES = "*q_proj"
"""Key of ``layer_quant_config`` where vLLM looks for query projections with a quantized output.

See `QuarkConfig` in vLLM's ``quark.py``.
It belongs to vLLM's reader, not to a model: it has no effect on query projections with other names."""


def read_quantization_config(block: Mapping[str, Any]) -> StoredConfig:
    """Return the `StoredConfig` of a ``quantization_config``. Any tool may have written it.

    Raises:
        ConfigError: A value has the wrong type or is out of its range.
    """
    export = value_of(block, "export", Mapping, {})
    options = ExportOptions(  # refuses other values
        **{name: export[name] for name in ("weight_format", "pack_method") if name in export},
        kv_cache_group=tuple(strings_of(export, "kv_cache_group")),
    )
    return StoredConfig(config=QConfig.from_dict(block), pack_method=options.pack_method)


def quantization_config(content: CheckpointContent, options: ExportOptions) -> dict[str, Any]:
    """Return the ``quantization_config`` to write."""
    model, config, plan = content.model, content.config, content.plan
    # A cache pattern also matches a fused projection of which only the queries are quantized.
    queries = {a.query_layer for a in plan.attentions if a.key_layer is None and a.value_layer is None}
    cached = (*config.kv_cache_quant_config, *config.kv_cache_group, *options.kv_cache_group)
    rows = [row for row in plan.quantized if row.name not in queries and any(fnmatchcase(row.name, p) for p in cached)]
    cache = {row.name: row.config for row in rows if row.config is not None}
    # A layer with a float weight is not excluded if it quantizes its own output, not that of a cache or
    # attention.
    excluded = [row.name for row in plan.rows if is_float(row) and not _rounds_its_output(row, plan, cache)]
    bare = attrs.evolve(config, exclude=[], layer_quant_config={}, layer_type_quant_config={}, kv_cache_quant_config={})
    layers = {
        row.name: row.config
        for row in plan.quantized
        if row.config is not None and row.name not in excluded and row.config != _without_patterns(bare, row)
    }
    export = {
        "weight_merge_groups": None,
        "kv_cache_group": sorted(name for name, layer in cache.items() if layer.output_tensors is not None),
        "min_kv_scale": max(options.min_kv_scale, config.min_kv_scale),
        "weight_format": options.weight_format,
        "pack_method": options.pack_method,
    }
    exact = attrs.evolve(
        bare,
        # The reader must know which experts stay fused.
        exclude=[*excluded, *routers(model, config, plan), *(f"{name}.*" for name in fused_mixtures(model)), *plan.carried_names],
        # Include excluded layers whose outputs enter the cache: vLLM looks for the names of the cache group
        # in this dictionary.
        layer_quant_config={**_queries_as_one(layers, plan), **{name: layer for name, layer in cache.items() if name in excluded}},
        kv_cache_quant_config={name: layer for name, layer in cache.items() if layer.output_tensors is not None},
    )
    return {**exact.to_dict(), "export": export, PLUGINS: provenance(exact)}


def _rounds_its_output(row: PlanRow, plan: QuantPlan, cache: Mapping[str, Any]) -> bool:
    """Return whether a layer itself quantizes its output, instead of a cache or attention."""
    inside = {layer for attention in plan.attentions for layer, _ in attention.states.values()}
    return row.config is not None and row.config.output_tensors is not None and row.name not in inside and row.name not in cache


def _queries_as_one(layers: dict[str, QLayerConfig], plan: QuantPlan) -> dict[str, QLayerConfig]:
    """Return ``layers`` with one pattern for all query projections, if all have the same quantized output.

    vLLM accepts such outputs only under that pattern. The result has no other patterns, and excluded layers
    stay excluded.
    """
    queries = {row.name: row.config for row in plan.quantized if fnmatchcase(row.name, _VLLM_QUERIES) and not is_float(row)}
    first = next(iter(queries.values()), None)
    if first is None or first.output_tensors is None or any(layers.get(name) != first for name in queries):
        return layers
    return {_VLLM_QUERIES: first, **{name: layer for name, layer in layers.items() if name not in queries}}


def _without_patterns(config: QConfig, row: PlanRow) -> QLayerConfig | None:
    """Return the configuration of a layer from ``config``, which has exact names instead of patterns."""
    return layer_config_for(config, row.name, layer_types().load_layer(row.layer_type)).config
