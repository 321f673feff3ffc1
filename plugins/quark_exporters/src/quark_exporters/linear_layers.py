"""Base classes of the layouts that store only quantized linear layers.

They define what an exporter refuses, which layers are excluded, and how an FP8 KV cache is stored. The scales
of the KV cache are stored with an attention module. A run that uses only the weights of a source omits them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar

from torch import Tensor

from quark.base.names import folded
from quark.checkpoint import CheckpointContent, CheckpointExporter, ExportOptions, StorageReader
from quark.checkpoint.content import is_float, routers
from quark.config.layer import QLayerConfig, TensorSpec
from quark.errors import CheckpointError
from quark.models.hf.missing_tensors import misfit, refuse_unannounced
from quark.models.layers.attention import KEY, QUERY, STORED_STATES, VALUE
from quark.models.plan.quant_plan import QuantPlan
from quark.numbers import canonicalize
from quark_exporters.stored_codes import qscheme_of, spec_of_layout

__all__ = ["Cache", "LinearExporter", "LinearReader", "cache_of", "cache_scales", "coded_rows", "float_names", "refuse_others"]


_CACHED = {"k_scale": ("k_proj", "qkv_proj"), "v_scale": ("v_proj", "qkv_proj")}
"""Name of a scale of an attention module → projections whose output it can scale."""


class Cache(Enum):
    """Whether an FP8 KV cache has a static scale per tensor or per head.

    Heads are stored as ``[heads, 1, 1]``.
    """

    per_tensor = "tensor"
    per_head = "head"


class LinearExporter(CheckpointExporter):
    """Base of the exporters that write linear layers with a `quark.checkpoint.LayerStorage`.

    It refuses all other quantized layers before a run starts.

    A run cannot resume from such a layout, because the layout may store rounded scales, and calibration needs
    the unrounded scales.

    Attributes:
        caches: The kinds of KV caches whose scales the layout can store.
    """

    resumes = False
    caches: ClassVar[tuple[Cache, ...]] = (Cache.per_tensor,)
    states_with_attention = True

    def reasons(self, content: CheckpointContent, options: ExportOptions) -> Iterator[tuple[str, str]]:
        """Implement `CheckpointExporter.reasons`."""
        reasons = list(super().reasons(content, options))
        yield from ((name, reason) for name, reason in reasons if not name)
        if names := content.config.run_time_algorithms:
            yield "", f"the algorithm {', '.join(names)} runs with the model, but the layout's readers do not know it"
        yield from _cache_reasons(content, self.caches)
        yield from ((name, reason) for name, reason in reasons if name)


def coded_rows(plan: QuantPlan) -> dict[str, QLayerConfig]:
    """Return a dictionary from the name of each layer with codes to its weight and input quantization."""
    rows = {row.name: row.quantized_to for row in plan.quantized if not is_float(row)}
    return {name: QLayerConfig(weight=config.weight, input_tensors=config.input_tensors) for name, config in rows.items()}


def float_names(content: CheckpointContent) -> list[str]:
    """Return the names of linear layers without codes, and of modules that runtimes treat like linear layers.

    The result includes the names of tensors that are copied unchanged from the source.
    """
    own = [row.name for row in content.plan.rows if is_float(row)] + routers(content.model, content.config, content.plan)
    return [*own, *content.plan.carried_names]


def _cache_reasons(content: CheckpointContent, caches: Sequence[Cache]) -> Iterator[tuple[str, str]]:
    """Yield the name of each attention module that the layout cannot store, and the reason.

    ``caches`` are the kinds of KV caches that the layout can store.
    """
    inside = {layer for row in content.plan.attentions for layer, _ in row.states.values()}
    first = next((cache_of(spec) for row in content.plan.attentions for _, spec in row.states.values()), None)
    for row in content.plan.attentions:
        if row.probabilities is not None or QUERY in row.states:
            yield row.name, "it stores no scales of queries and of attention probabilities"
        elif row.states and not caches:
            yield row.name, "it stores no scales of the KV cache"
        elif KEY in row.states or VALUE in row.states:
            if not {KEY, VALUE} <= row.states.keys():
                yield row.name, "it has one scheme for the whole KV cache, but only keys or only values are quantized"
            elif any(cache_of(spec) not in caches for _, spec in row.states.values()):
                known = " or ".join(f"one static scale per {cache.value}" for cache in caches)
                yield (
                    row.name,
                    f"it supports only an FP8 (E4M3) KV cache with {known}: use such a kv_cache_scheme, or leave it out, and choose a "
                    "cache without stored scales when you start the runtime",
                )
            elif any(cache_of(spec) is not first for _, spec in row.states.values()):
                yield row.name, "it has one scheme for the whole KV cache, but others have other scales: use one kv_cache_scheme"
    for plan_row in content.plan.quantized:
        if plan_row.quantized_to.output_tensors is not None and plan_row.name not in inside:
            yield (
                plan_row.name,
                "it stores scales of keys and values as attention caches them, but this model rounds outputs of projections: set "
                "kv_cache_post_rope=True, or leave output_tensors out",
            )


def cache_of(spec: TensorSpec) -> Cache | None:
    """Return the kind of a static FP8 cache, or None if the cache is not a static FP8 cache."""
    specs = canonicalize(spec)
    first = specs[0]
    if (len(specs), first.dtype.name, bool(first.is_dynamic)) != (1, "fp8_e4m3", False):
        return None
    is_per_head = qscheme_of(first) == "per_channel" and first.ch_axis == 1
    return Cache.per_head if is_per_head else Cache.per_tensor if qscheme_of(first) == "per_tensor" else None


class LinearReader(StorageReader):
    """Base of the readers of these layouts. If keys and values have a scale, the model has an FP8 cache."""

    def cache(self, stored: Mapping[str, Any]) -> dict[str, QLayerConfig]:
        """Implement `StorageReader.cache`."""
        owners = {name.rpartition(".")[0] for name in stored}
        per_tensor = QLayerConfig(output_tensors=spec_of_layout("fp8_e4m3", "per_tensor", zero_point_type="int32"))
        per_head = QLayerConfig(output_tensors=spec_of_layout("fp8_e4m3", "per_channel", ch_axis=1, zero_point_type="int32"))
        return {
            f"{attention}.{projection}": per_head if len(shape) == 3 else per_tensor
            for (attention, _, leaf), (_, shape) in ((name.rpartition("."), tensor) for name, tensor in stored.items())
            for projection in _CACHED.get(leaf, ())
            if f"{attention}.{projection}" in owners
        }


def cache_scales(layer: str, stored: Container[str]) -> tuple[str, ...]:
    """Return the names of the stored scales of queries, keys and values beside a projection ``layer``.

    >>> cache_scales("model.layers.0.self_attn.k_proj", {"model.layers.0.self_attn.k_scale"})
    ('model.layers.0.self_attn.k_scale',)
    """
    attention = layer.rpartition(".")[0]
    names = (f"{attention}.{state}_scale" for state in STORED_STATES.values())
    return tuple(name for name in names if name in stored)


_SCALES = ("weight_scale", "weight_scale_inv", "weight_global_scale", "weight_zero_point", "input_scale", "input_global_scale")


def refuse_others(layer: str, stored: Mapping[str, Tensor], announced: Mapping[str, Tensor], *, may_be: Container[str] = ()) -> None:
    """Refuse tensors of a layer that contradict its configuration.

    Args:
        layer: Full name of the layer.
        stored: All tensors of the checkpoint, on the meta device.
        announced: Tensors that a reader of the layout needs. The keys are the last parts of their names.
        may_be: The last parts of the names of optional scales.

    Raises:
        CheckpointError: A tensor is missing, unexpected, or has another dtype or shape.
    """
    if missing := [name for leaf in announced if (name := f"{layer}.{leaf}") not in stored]:
        raise CheckpointError(f"the checkpoint lacks {folded(missing)}, so '{layer}' cannot be read: download it again")
    others = [leaf for leaf in _SCALES if leaf not in announced and leaf not in may_be]
    refuse_unannounced([name for leaf in others if (name := f"{layer}.{leaf}") in stored], layer)
    for leaf, wanted in announced.items():
        if error := misfit(stored[f"{layer}.{leaf}"], wanted):
            raise CheckpointError(f"'{layer}.{leaf}' {error}: the checkpoint is damaged, or belongs to another model")
