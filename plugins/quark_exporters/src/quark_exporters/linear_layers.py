"""Base classes for the layouts in which only linear layers are quantized.

The exporter refuses models that such a layout cannot store, lists the layers that stay float, and supports an
FP8 KV cache. The scales of the cache are stored with the attention module. A dequantizer ignores these
scales, because it reads only weights.
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
"""Maps each scale of an attention module to the projections whose output can have this scale."""


class Cache(Enum):
    """The kinds of FP8 KV cache with static scales: with one scale per tensor, or one scale per head.

    Scales per head are stored in the shape ``[heads, 1, 1]``.
    """

    per_tensor = "tensor"
    per_head = "head"


class LinearExporter(CheckpointExporter):
    """Writes linear layers in the form that a `quark.checkpoint.LayerStorage` defines.

    If other layers are quantized, the exporter refuses the model before the run begins.

    A run cannot resume from this layout: the layout may store rounded scales, but calibration needs the exact
    ones.

    Attributes:
        caches: The kinds of KV cache whose scales the layout can store.
    """

    resumes = False
    caches: ClassVar[tuple[Cache, ...]] = (Cache.per_tensor,)
    states_with_attention = True

    def reasons(self, content: CheckpointContent, options: ExportOptions) -> Iterator[tuple[str, str]]:
        """Yield why the layout cannot store the model (see `CheckpointExporter.reasons`)."""
        reasons = list(super().reasons(content, options))
        yield from ((name, reason) for name, reason in reasons if not name)
        if names := content.config.run_time_algorithms:
            yield "", f"the algorithm {', '.join(names)} runs with the model, but the layout's readers do not know it"
        yield from _cache_reasons(content, self.caches)
        yield from ((name, reason) for name, reason in reasons if name)


def coded_rows(plan: QuantPlan) -> dict[str, QLayerConfig]:
    """Return a dictionary from each layer that has codes to the quantization of its weight and input."""
    rows = {row.name: row.quantized_to for row in plan.quantized if not is_float(row)}
    return {name: QLayerConfig(weight=config.weight, input_tensors=config.input_tensors) for name, config in rows.items()}


def float_names(content: CheckpointContent) -> list[str]:
    """Return the names of the layers that a runtime must not quantize.

    These are linear layers that stay float, other modules that runtimes treat as linear layers, and tensors
    that quark copies from the source.
    """
    own = [row.name for row in content.plan.rows if is_float(row)] + routers(content.model, content.config, content.plan)
    return [*own, *content.plan.carried_names]


def _cache_reasons(content: CheckpointContent, caches: Sequence[Cache]) -> Iterator[tuple[str, str]]:
    """Yield each module whose attention or output quantization the layout cannot store, and why it cannot.

    ``caches`` are the kinds of KV cache that the layout can store.
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
                    f"it supports only an FP8 (E4M3) KV cache with {known}. Use such a kv_cache_scheme, or leave it out and choose a "
                    "cache without stored scales when you start the runtime",
                )
            elif any(cache_of(spec) is not first for _, spec in row.states.values()):
                yield row.name, "it has one scheme for the whole KV cache, but layers have different schemes. Use one kv_cache_scheme"
    for plan_row in content.plan.quantized:
        if plan_row.quantized_to.output_tensors is not None and plan_row.name not in inside:
            yield (
                plan_row.name,
                "it stores scales of keys and values as attention caches them, but this model rounds outputs of projections. Set "
                "kv_cache_post_rope=True, or leave output_tensors out",
            )


def cache_of(spec: TensorSpec) -> Cache | None:
    """Return the kind of a static FP8 KV cache, or None if ``spec`` describes another cache."""
    specs = canonicalize(spec)
    first = specs[0]
    if (len(specs), first.dtype.name, bool(first.is_dynamic)) != (1, "fp8_e4m3", False):
        return None
    is_per_head = qscheme_of(first) == "per_channel" and first.ch_axis == 1
    return Cache.per_head if is_per_head else Cache.per_tensor if qscheme_of(first) == "per_tensor" else None


class LinearReader(StorageReader):
    """Reads a layout in which only linear layers are quantized.

    If the checkpoint has scales for keys and values, the model gets an FP8 KV cache.
    """

    def cache(self, stored: Mapping[str, Any]) -> dict[str, QLayerConfig]:
        """Return the quantization of the KV cache (see `StorageReader.cache`)."""
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
    """Return the names of the scales that are stored with the attention module of ``layer``.

    These are scales of queries, keys and values.

    >>> cache_scales("model.layers.0.self_attn.k_proj", {"model.layers.0.self_attn.k_scale"})
    ('model.layers.0.self_attn.k_scale',)
    """
    attention = layer.rpartition(".")[0]
    names = (f"{attention}.{state}_scale" for state in STORED_STATES.values())
    return tuple(name for name in names if name in stored)


_SCALES = ("weight_scale", "weight_scale_inv", "weight_global_scale", "weight_zero_point", "input_scale", "input_global_scale")


def refuse_others(layer: str, stored: Mapping[str, Tensor], announced: Mapping[str, Tensor], *, may_be: Container[str] = ()) -> None:
    """Raise an error if the stored tensors of a layer contradict the configuration of the layer.

    Args:
        layer: Full name of the layer.
        stored: All tensors of the checkpoint, on the meta device.
        announced: Maps the last part of a tensor's name to a tensor with the dtype and the shape that a
            reader of the layout expects.
        may_be: Scales that the layer may have although ``announced`` lacks them, each as the last part of its
            name.

    Raises:
        CheckpointError: A tensor is missing, unexpected, or has another dtype or shape.
    """
    if missing := [name for leaf in announced if (name := f"{layer}.{leaf}") not in stored]:
        raise CheckpointError(f"the checkpoint lacks {folded(missing)}, so '{layer}' cannot be read. Download the checkpoint again")
    others = [leaf for leaf in _SCALES if leaf not in announced and leaf not in may_be]
    refuse_unannounced([name for leaf in others if (name := f"{layer}.{leaf}") in stored], layer)
    for leaf, wanted in announced.items():
        if error := misfit(stored[f"{layer}.{leaf}"], wanted):
            raise CheckpointError(f"'{layer}.{leaf}' {error}. The checkpoint is damaged or belongs to another model")
