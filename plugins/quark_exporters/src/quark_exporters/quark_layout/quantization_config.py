"""Functions that read the ``quantization_config`` of a checkpoint, and that make a new one.

quark writes exact module names instead of patterns. Readers use the first pattern that matches a name, but
some JSON writers sort keys, and sorted patterns could give another result. If a reader expects a list or a
dictionary, quark writes an empty list or dictionary instead of null. Source: AMD Quark 0.13.
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
"""The key of ``layer_quant_config`` under which vLLM looks for query projections with a quantized output.

See `QuarkConfig` in vLLM's ``quark.py``. The key is fixed in vLLM's reader, so it has no effect on query
projections with other names.
"""


def read_quantization_config(block: Mapping[str, Any]) -> StoredConfig:
    """Return the `StoredConfig` that a ``quantization_config`` of any tool describes.

    Raises:
        ConfigError: A value has the wrong type or is out of range.
    """
    export = value_of(block, "export", Mapping, {})
    options = ExportOptions(  # raises ConfigError for other values
        **{name: export[name] for name in ("weight_format", "pack_method") if name in export},
        kv_cache_group=tuple(strings_of(export, "kv_cache_group")),
    )
    return StoredConfig(config=QConfig.from_dict(block), pack_method=options.pack_method)


def quantization_config(content: CheckpointContent, options: ExportOptions) -> dict[str, Any]:
    """Return the ``quantization_config`` that the exporter writes to a checkpoint."""
    model, config, plan = content.model, content.config, content.plan
    # A pattern for the KV cache also matches a fused projection in which only the queries are quantized.
    queries = {a.query_layer for a in plan.attentions if a.key_layer is None and a.value_layer is None}
    cached = (*config.kv_cache_quant_config, *config.kv_cache_group, *options.kv_cache_group)
    rows = [row for row in plan.quantized if row.name not in queries and any(fnmatchcase(row.name, p) for p in cached)]
    cache = {row.name: row.config for row in rows if row.config is not None}
    # A layer with a float weight may quantize its output. The layer is excluded if the KV cache or the
    # attention quantizes it instead.
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
        # The exclusions tell the reader which experts stay fused.
        exclude=[*excluded, *routers(model, config, plan), *(f"{name}.*" for name in fused_mixtures(model)), *plan.carried_names],
        # Include excluded layers whose outputs enter the KV cache, because vLLM looks up the names of
        # ``kv_cache_group`` in ``layer_quant_config``.
        layer_quant_config={**_queries_as_one(layers, plan), **{name: layer for name, layer in cache.items() if name in excluded}},
        kv_cache_quant_config={name: layer for name, layer in cache.items() if layer.output_tensors is not None},
    )
    return {**exact.to_dict(), "export": export, PLUGINS: provenance(exact)}


def _rounds_its_output(row: PlanRow, plan: QuantPlan, cache: Mapping[str, Any]) -> bool:
    """Return whether the layer of a row itself quantizes its output.

    If not, the output may still be quantized by the KV cache or the attention.
    """
    inside = {layer for attention in plan.attentions for layer, _ in attention.states.values()}
    return row.config is not None and row.config.output_tensors is not None and row.name not in inside and row.name not in cache


def _queries_as_one(layers: dict[str, QLayerConfig], plan: QuantPlan) -> dict[str, QLayerConfig]:
    """Return ``layers`` with one pattern instead of the names of the query projections.

    If not all query projections quantize their output in the same way, ``layers`` is returned unchanged.

    vLLM accepts quantized outputs of query projections only under this pattern. The result has no other
    pattern, and excluded layers stay excluded.
    """
    queries = {row.name: row.config for row in plan.quantized if fnmatchcase(row.name, _VLLM_QUERIES) and not is_float(row)}
    first = next(iter(queries.values()), None)
    if first is None or first.output_tensors is None or any(layers.get(name) != first for name in queries):
        return layers
    return {_VLLM_QUERIES: first, **{name: layer for name, layer in layers.items() if name not in queries}}


def _without_patterns(config: QConfig, row: PlanRow) -> QLayerConfig | None:
    """Return the layer configuration that ``config`` has for the layer of a row.

    ``config`` must have exact names instead of patterns.
    """
    return layer_config_for(config, row.name, layer_types().load_layer(row.layer_type)).config
