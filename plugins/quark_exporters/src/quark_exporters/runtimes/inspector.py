"""RuntimeInspector: which runtimes, vLLM and SGLang, load a checkpoint, and by which of their methods.

Runtimes are not run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from quark.base.names import folded, has_wildcard
from quark.checkpoint.float_layers import is_float
from quark.checkpoint.inspection import CheckpointFacts, RuntimeSupport
from quark.config.layer import QLayerConfig, levels
from quark.models.plan.plan_row import PlanRow
from quark.models.plan.rules import first_match
from quark_exporters.runtimes.rules import Rule, rule_for, rules

__all__ = ["RuntimeInspector"]

_QUARK = "safetensors"
_EXPERTS = ".experts."
_Reasons = dict[str, list[str]]


class RuntimeInspector:
    """Inspects safetensors layouts of this distribution, as `quark.checkpoint.inspection.Inspector`."""

    def support(self, facts: CheckpointFacts) -> Iterator[RuntimeSupport]:
        """As `quark.checkpoint.inspection.Inspector.support`."""
        rows = {row.name: row for row in facts.plan.rows if not row.is_lookup and row.is_linear}
        coded = {name: row.quantized_to for name, row in rows.items() if row.config is not None and not is_float(row)}
        common: _Reasons = {}
        for reason, names in (*_whole_model(facts), *_other_layers(facts, coded)):
            common.setdefault(reason, []).extend(names)
        for fused, parts in _fused(rows):
            for reason in _disagreements(facts, fused, {part: rows[part] for part in parts}):
                common.setdefault(reason, []).extend(parts)
        found = {name: rule_for(facts.layout, config, experts=_EXPERTS in name) for name, config in coded.items()}
        for mixture, parts in _mixtures(rows).items():
            if any(_of_weight(rows[part]) != _of_weight(rows[parts[0]]) for part in parts):
                common.setdefault(f"experts of {mixture}, which they compute as one layer, are quantized in several ways", []).extend(parts)
        for runtime, summary in rules().runtimes.items():
            yield _support(runtime, summary, found, {reason: list(names) for reason, names in common.items()}, facts)


def _support(runtime: str, summary: str, found: Mapping[str, Rule | None], reasons: _Reasons, facts: CheckpointFacts) -> RuntimeSupport:
    methods: dict[str, list[str]] = {}
    for name, rule in found.items():
        if rule is not None and runtime in rule.on:
            methods.setdefault(f"{rule.method}: {rule.on[runtime]}", []).append(name)
            continue
        why = (
            "no scheme of its reader is like that of" if rule is None else rule.refused.get(runtime, f"it has no kernel for {rule.method}")
        )
        reasons.setdefault(why, []).append(name)
    cached = any(row.states for row in facts.plan.attentions)
    return RuntimeSupport(
        runtime=runtime,
        summary=summary,
        methods={method: folded(names, most=3) for method, names in methods.items()},
        refusals=tuple(reason + (f" ({folded(names, most=3)})" if names else "") for reason, names in reasons.items()),
        notes=("scales of the cache are used where it is started with kv_cache_dtype=fp8",) if cached else (),
    )


def _whole_model(facts: CheckpointFacts) -> Iterator[tuple[str, list[str]]]:
    """Yield reasons in the configuration for which all of the runtimes refuse."""
    config = facts.config
    if names := config.run_time_algorithms:
        yield f"the algorithm {', '.join(names)} runs with the model, and they would compute something else without a word", []
    if config.weight_format == "fake_quantized":
        yield "it stores rounded values, which they would take for codes", []
    if facts.layout == _QUARK:
        missing = [key for key in ("export", "exclude", "layer_type_quant_config") if facts.block.get(key) is None]
        if missing:
            yield f"quantization_config has no {', '.join(missing)}, without which their readers fail", []
        if names := _inert_exclusions(facts):
            yield "the layer is float, and quantization_config excludes it by a pattern alone, which they compare as a name", names


def _inert_exclusions(facts: CheckpointFacts) -> list[str]:
    """Return float layers inside of decoder blocks that runtimes take for quantized.

    Runtimes read names and ``re:``, and no other patterns.
    """
    patterns = [pattern for pattern in facts.config.exclude if has_wildcard(pattern) and not pattern.startswith("re:")]
    exact = {pattern for pattern in facts.config.exclude if not has_wildcard(pattern)}
    return [
        row.name
        for row in facts.plan.rows
        if row.is_linear and is_float(row) and row.name not in (exact | facts.heads) and first_match(row.name, patterns) is not None
    ]


def _other_layers(facts: CheckpointFacts, coded: Mapping[str, QLayerConfig]) -> Iterator[tuple[str, list[str]]]:
    """Yield quantized layers that the runtimes leave in floating point."""
    if names := [name for name in coded if name in facts.heads]:
        yield "the output head is quantized, which they load in floating point", names
    if names := [row.name for row in facts.plan.quantized if row.is_lookup]:
        yield "an embedding is quantized, which they load in floating point", names
    if names := [row.name for row in facts.plan.quantized if not row.is_linear and not row.is_lookup]:
        yield "they have no quantized layer of its type", names
    if names := [name for name, config in coded.items() if config.bias is not None]:
        yield "its bias is quantized", names
    cached = {layer for row in facts.plan.attentions for layer, _ in row.states.values()}
    feeding = (*facts.config.kv_cache_quant_config, *facts.config.kv_cache_group)
    elsewhere = [name for name, config in coded.items() if config.output_tensors is not None and name not in cached]
    if names := [name for name in elsewhere if first_match(name, feeding) is None]:
        yield "its output is quantized, and it feeds no cache", names


def _fused(rows: Mapping[str, PlanRow]) -> Iterator[tuple[str, list[str]]]:
    """Yield each layer that runtimes fuse, and the names of its parts."""
    for fused, parts in rules().fused.items():
        for name in (name for name in rows if name.rpartition(".")[2] == parts[0] and _EXPERTS not in name):
            owner = name.rpartition(".")[0]
            names = [f"{owner}.{part}" for part in parts]
            if all(part in rows for part in names):
                yield f"{owner}.{fused}", names


def _mixtures(rows: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of the layers that the experts of each mixture have."""
    mixtures: dict[str, list[str]] = {}
    for name in rows:
        if _EXPERTS in name:
            mixtures.setdefault(name.partition(_EXPERTS)[0], []).append(name)
    return mixtures


def _disagreements(facts: CheckpointFacts, fused: str, parts: Mapping[str, PlanRow]) -> Iterator[str]:
    configs = [_of_weight(row) for row in parts.values()]
    kind = fused.rpartition(".")[2]
    if any(config != configs[0] for config in configs):
        yield f"parts of {kind}, which they compute as one layer, are quantized in several ways"
    elif configs[0] is not None and len(levels(configs[0].weight)) > 1:
        scales = {facts.number(f"{part}.{leaf}") for part in parts for leaf in ("weight_scale_2", "weight_global_scale")} - {None}
        if len(scales) > 1:
            yield f"parts of {kind} have different scales over the whole tensor, of which they take one for all"


def _of_weight(row: PlanRow) -> QLayerConfig | None:
    if row.config is None or is_float(row):
        return None
    return QLayerConfig(weight=row.config.weight, input_tensors=row.config.input_tensors)
