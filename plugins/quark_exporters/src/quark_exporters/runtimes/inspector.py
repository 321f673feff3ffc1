"""`RuntimeInspector` finds out which runtimes (vLLM, SGLang) can load a checkpoint.

For each layer, it also finds the method with which the runtime computes.

It does not run any runtime. It applies the rules in ``rules.toml``, which describe what each runtime reads.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import attrs

from quark.base.names import folded, has_wildcard
from quark.checkpoint.content import is_float
from quark.checkpoint.inspection import CheckpointFacts, RuntimeSupport
from quark.config.layer import QLayerConfig, TensorSpec, levels
from quark.models.layers.attention import QUERY
from quark.models.plan.plan_row import PlanRow
from quark.models.plan.rules import first_match
from quark.numbers import canonicalize
from quark_exporters.linear_layers import Cache, cache_of
from quark_exporters.stored_codes import runs_along_rows, short_block_of

__all__ = ["Rule", "Rules", "RuntimeInspector", "rule_for", "rules"]

_QUARK = "safetensors"
_EXPERTS = ".experts."
_Reason = tuple[str, list[str]]
"""A reason why a runtime refuses, and the names of the layers concerned.

The list is empty if the whole model is concerned.
"""


class RuntimeInspector:
    """The `quark.checkpoint.inspection.Inspector` for the safetensors layouts of quark-exporters."""

    def support(self, facts: CheckpointFacts) -> Iterator[RuntimeSupport]:
        """Yield the support of each runtime (see `quark.checkpoint.inspection.Inspector.support`)."""
        rows = {row.name: row for row in facts.plan.rows if not row.is_lookup and row.is_linear}
        coded = {name: row.quantized_to for name, row in rows.items() if row.config is not None and not is_float(row)}
        common = [*_whole_model(facts), *_other_layers(facts, coded), *_fused_layers(facts, rows), *_mixtures(rows)]
        found = {name: rule_for(facts.layout, config, experts=_EXPERTS in name) for name, config in coded.items()}
        alone = [_support(runtime, summary, found, common, facts) for runtime, summary in rules().runtimes.items()]
        yield from alone
        yield _with_plugin(facts, [support for support in alone if support.runtime.startswith("vllm_")])


def _with_plugin(facts: CheckpointFacts, alone: Iterable[RuntimeSupport]) -> RuntimeSupport:
    """Return how vLLM with quark-vllm supports a checkpoint.

    With quark-vllm, vLLM uses quark's layers for schemes that vLLM itself does not support.

    Args:
        facts: Facts about the checkpoint.
        alone: How vLLM without quark-vllm supports the checkpoint.
    """
    refusals = []
    if facts.config.softmax_quant_spec is not None:
        refusals.append("it quantizes attention probabilities, which fused kernels never store")
    if names := [row.name for row in facts.plan.quantized if not row.is_linear and not row.is_lookup]:
        refusals.append(f"it has no quantized layer of this type ({folded(names, most=3)})")
    served = [row.name for row in facts.plan.quantized if row.is_linear or row.is_lookup]
    asked = "if vLLM itself does not load it" if facts.layout == _QUARK else "with --quantization quark_simulate"
    mixed = {
        f"vLLM's own on {support.summary.rpartition(' on ')[2]}, for a checkpoint that vLLM alone refuses": folded(
            sorted(support.own_layers), most=3
        )
        for support in alone
        if support.own_layers and not support.loads
    }
    return RuntimeSupport(
        runtime="quark_vllm",
        summary="vLLM with quark-vllm",
        methods={f"quark_simulate: {asked}; or --quantization quark_packed": folded(served, most=3), **mixed},
        refusals=tuple(refusals),
        notes=("install quark-vllm next to vLLM",),
    )


def _support(
    runtime: str, summary: str, found: Mapping[str, Rule | None], common: Iterable[_Reason], facts: CheckpointFacts
) -> RuntimeSupport:
    methods: dict[str, list[str]] = {}
    reasons: dict[str, list[str]] = {}
    for reason, names in common:
        reasons.setdefault(reason, []).extend(names)
    for name, rule in found.items():
        if rule is not None and runtime in rule.on:
            methods.setdefault(f"{rule.method}: {rule.on[runtime]}", []).append(name)
            continue
        why = "its reader has no scheme for" if rule is None else rule.refused.get(runtime, f"it has no kernel for {rule.method}")
        reasons.setdefault(why, []).append(name)
    elsewhere = {name for _, names in common for name in names}
    is_own = facts.layout == _QUARK and all(names for _, names in common)
    own = [name for name, rule in found.items() if is_own and rule is not None and runtime in rule.on and name not in elsewhere]
    return RuntimeSupport(
        runtime=runtime,
        summary=summary,
        methods={method: folded(names, most=3) for method, names in methods.items()},
        refusals=tuple(reason + (f" ({folded(names, most=3)})" if names else "") for reason, names in reasons.items()),
        notes=tuple(_cache_notes(runtime, facts)),
        own_layers=frozenset(own),
    )


_CACHE_NOTES = {
    Cache.per_tensor: {"": "it uses the scales of the KV cache if started with kv_cache_dtype=fp8"},
    Cache.per_head: {
        "": "its FP8 KV cache uses a scale for each head, which needs FlashAttention 3",
        "vllm_cpu": "its FP8 KV cache uses the largest scale of all heads for each head",
        "sglang": "it ignores the scales of heads, and its KV cache stays float",
    },
}
"""Maps a kind of FP8 KV cache to what runtimes do with it.

The key is the name of a runtime, or ``""`` for all others.
"""


def _loaded_caches(facts: CheckpointFacts) -> tuple[Cache, ...]:
    return (Cache.per_tensor,) if facts.layout == _QUARK else tuple(Cache)


def _cache_notes(runtime: str, facts: CheckpointFacts) -> Iterator[str]:
    kind = next((cache_of(spec) for row in facts.plan.attentions for _, spec in row.states.values()), None)
    if kind in _loaded_caches(facts):
        assert kind is not None
        yield _CACHE_NOTES[kind].get(runtime, _CACHE_NOTES[kind][""])


def _whole_model(facts: CheckpointFacts) -> Iterator[_Reason]:
    """Yield each reason for which all runtimes refuse a checkpoint because of its configuration."""
    config = facts.config
    if names := config.run_time_algorithms:
        yield f"the algorithm {', '.join(names)} runs with the model, but they would leave it out and compute something else", []
    if config.weight_format == "fake_quantized":
        yield "it stores rounded values, but they would interpret the values as codes", []
    if facts.layout == _QUARK:
        missing = [key for key in ("export", "exclude", "layer_type_quant_config") if facts.block.get(key) is None]
        if missing:
            yield f"quantization_config lacks {', '.join(missing)}, which their readers need", []
        if names := _inert_exclusions(facts):
            yield "the layer is float and quantization_config excludes it by a pattern, but they compare exact names", names


def _inert_exclusions(facts: CheckpointFacts) -> list[str]:
    """Return the linear float layers that runtimes would treat as quantized layers.

    Runtimes exclude layers by exact names and by patterns that begin with ``re:``. They ignore other
    patterns.
    """
    patterns = [pattern for pattern in facts.config.exclude if has_wildcard(pattern) and not pattern.startswith("re:")]
    exact = {pattern for pattern in facts.config.exclude if not has_wildcard(pattern)}
    return [
        row.name
        for row in facts.plan.rows
        if row.is_linear and is_float(row) and row.name not in (exact | facts.heads) and first_match(row.name, patterns) is not None
    ]


def _other_layers(facts: CheckpointFacts, coded: Mapping[str, QLayerConfig]) -> Iterator[_Reason]:
    """Yield each reason for which runtimes cannot load some quantized layers, and the names of the layers.

    The reasons are about layers, biases, outputs and KV caches.
    """
    if names := [name for name in coded if name in facts.heads]:
        yield "the output head is quantized, but they load it in floating point", names
    if names := [row.name for row in facts.plan.quantized if row.is_lookup]:
        yield "an embedding is quantized, but they load it in floating point", names
    if names := [row.name for row in facts.plan.quantized if not row.is_linear and not row.is_lookup]:
        yield "they have no quantized layer of the type of this layer", names
    for row in (row for row in facts.plan.quantized if row.is_linear and row.name in coded):
        if (error := short_block_of(coded[row.name], row.shape)) is not None:
            yield error, [row.name]
    if names := [name for name, config in coded.items() if config.bias is not None]:
        yield "its bias is quantized", names
    fitting = _loaded_caches(facts)
    caches = {row.name: [cache_of(spec) for state, (_, spec) in row.states.items() if state != QUERY] for row in facts.plan.attentions}
    if names := [name for name, kinds in caches.items() if any(kind not in fitting for kind in kinds)]:
        yield "its KV cache is not FP8 with one scale, the only kind that they load in this layout", names
    cached = {layer for row in facts.plan.attentions for layer, _ in row.states.values()}
    feeding = (*facts.config.kv_cache_quant_config, *facts.config.kv_cache_group)
    elsewhere = [name for name, config in coded.items() if config.output_tensors is not None and name not in cached]
    if names := [name for name in elsewhere if first_match(name, feeding) is None]:
        yield "its output is quantized, but is not stored in a KV cache", names


def _fused_layers(facts: CheckpointFacts, rows: Mapping[str, PlanRow]) -> Iterator[_Reason]:
    """Yield each group of layers that runtimes fuse, although the layers differ in scheme or scale."""
    for kind, parts in rules().fused.items():
        for name in (name for name in rows if name.rpartition(".")[2] == parts[0] and _EXPERTS not in name):
            names = [f"{name.rpartition('.')[0]}.{part}" for part in parts]
            if not all(part in rows for part in names):
                continue
            first = _of_weight(rows[name])
            if any(_of_weight(rows[part]) != first for part in names):
                yield f"they fuse {kind} into one layer, but its parts have different schemes", names
            elif first is not None and len(levels(first.weight)) > 1:
                scales = {facts.number(f"{part}.{leaf}") for part in names for leaf in ("weight_scale_2", "weight_global_scale")} - {None}
                if len(scales) > 1:
                    yield f"they use one tensor scale for all parts of {kind}, but the scales differ", names


def _mixtures(rows: Mapping[str, PlanRow]) -> Iterator[_Reason]:
    """Yield the experts' layers of each mixture-of-experts layer in which the experts' schemes differ."""
    mixtures: dict[str, list[str]] = {}
    for name in rows:
        if _EXPERTS in name:
            mixtures.setdefault(name.partition(_EXPERTS)[0], []).append(name)
    for mixture, parts in mixtures.items():
        if any(_of_weight(rows[part]) != _of_weight(rows[parts[0]]) for part in parts):
            yield f"they fuse the experts of {mixture} into one layer, but these have different schemes", parts


def _of_weight(row: PlanRow) -> QLayerConfig | None:
    if row.config is None or is_float(row):
        return None
    return QLayerConfig(weight=row.config.weight, input_tensors=row.config.input_tensors)


@attrs.frozen
class Rule:
    """A rule about the method with which runtimes compute one kind of quantized layer.

    Attributes:
        layout: Name of the layout.
        method: Name of the runtime's class that computes such layers.
        weight, input: Patterns for the specs of the weight and the input. A pattern is a table, a list with
            one table for each level, ``"none"`` for a float tensor, or ``"any"``.
        on: Maps each runtime that supports such layers to a text. The text lists the kernels and what they
            need.
        refused: Maps each runtime that does not support such layers to the reason.
        experts: Whether the rule is for experts. Runtimes fuse experts into one layer, and compute this layer
            with other methods than linear layers.
    """

    layout: str
    method: str
    weight: Any
    input: Any
    on: Mapping[str, str]
    refused: Mapping[str, str] = attrs.field(factory=dict)
    experts: bool = False


@attrs.frozen
class Rules:
    """The content of ``rules.toml``.

    Attributes:
        runtimes: Maps the name of a runtime to its description.
        fused: Maps the name of a fused layer to the names of its parts.
        rules: The rules, in the order in which runtimes try them.
    """

    runtimes: Mapping[str, str]
    fused: Mapping[str, list[str]]
    rules: tuple[Rule, ...]


@cache
def rules() -> Rules:
    """Return the content of ``rules.toml``."""
    content = tomllib.loads((files(__package__) / "rules.toml").read_text(encoding="utf-8"))
    return Rules(content["runtimes"], content["fused"], tuple(Rule(**rule) for rule in content["rules"]))


def rule_for(layout: str, config: QLayerConfig, *, experts: bool = False) -> Rule | None:
    """Return the first rule that matches a layer, or None if no rule matches.

    ``layout`` is the layout of the checkpoint, and ``config`` is the quantization of the layer. ``experts``
    says whether the layer is an expert of a mixture-of-experts layer.
    """
    if config.weight is not None and any(map(runs_along_rows, canonicalize(config.weight))):
        return None
    for rule in rules().rules:
        is_about = rule.layout == layout and rule.experts == experts
        if is_about and _fits(rule.weight, config.weight) and _fits(rule.input, config.input_tensors):
            return rule
    return None


def _fits(pattern: Any, spec: TensorSpec | None) -> bool:
    if pattern == "any":
        return True
    if spec is None or pattern == "none":
        return spec is None and pattern == "none"
    specs, tables = canonicalize(spec), pattern if isinstance(pattern, list) else [pattern]
    return len(specs) == len(tables) and all(
        _is_one_of(wanted, level.to_dict().get(key)) for level, table in zip(specs, tables, strict=True) for key, wanted in table.items()
    )


def _is_one_of(wanted: Any, value: Any) -> bool:
    if wanted == "positive":
        return isinstance(value, int) and value > 0
    value = list(value) if isinstance(value, tuple) else value
    return bool(value in wanted if isinstance(wanted, list) else value == wanted)
