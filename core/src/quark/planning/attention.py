"""Which modules of a model are attention, and what of them is quantized."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
from torch import nn

from quark.config.architecture import Architecture
from quark.config.enums import QSchemeType
from quark.config.layer import TensorSpec, levels
from quark.config.model import QConfig
from quark.config.tensor import QTensorConfig
from quark.hf.attention_switch import why_unswitchable
from quark.modules.attention import KEY, QUERY, VALUE
from quark.names import folded
from quark.planning.inferred_architecture import attention_modules, with_inferred_attention
from quark.planning.precedence import first_match

if TYPE_CHECKING:
    from quark.planning.plan import PlanRow

__all__ = [
    "AttentionRow",
    "attention_errors",
    "attention_facts",
    "attention_rows",
    "attention_warnings",
    "resolve_attention",
    "why_before_rope",
]


@attrs.frozen
class AttentionRow:
    """One attention module of which something is quantized.

    Keys, values and queries are those that attention gets: behind norms on single heads and the rotary embedding. Where one of them is
    quantized there, it takes the place of the output quantization of a projection.

    Attributes:
        name: Full module name.
        probabilities: Of the softmax; None where they stay float.
        key: Of the keys; None where they stay as they are.
        key_layer: Full name of the projection whose output quantization ``key`` takes the place of; None where ``key`` is None.
        value, value_layer: Likewise of the values.
        query, query_layer: Likewise of the queries.
    """

    name: str
    probabilities: QTensorConfig | None = None
    key: TensorSpec | None = None
    key_layer: str | None = None
    value: TensorSpec | None = None
    value_layer: str | None = None
    query: TensorSpec | None = None
    query_layer: str | None = None

    @property
    def states(self) -> dict[str, tuple[str, TensorSpec]]:
        """Projection and spec of each quantized state, by attribute of the attention module (`quark.modules.attention.STATES`)."""
        found = {QUERY: (self.query_layer, self.query), KEY: (self.key_layer, self.key), VALUE: (self.value_layer, self.value)}
        return {name: (layer, spec) for name, (layer, spec) in found.items() if layer is not None and spec is not None}


def attention_rows(
    model: nn.Module, rows: Sequence[PlanRow], config: QConfig, architecture: Architecture | None
) -> tuple[AttentionRow, ...]:
    """The attention modules of ``model`` of which ``config`` quantizes something, in the model's order. Nothing is checked.

    They are the parents of the query, key and value projections that the architecture names; without such names, modules that are called
    ``…attn`` or ``…attention``. An exclusion is about layers, and does not reach them. Where ``config`` leaves it to the model whether keys
    and queries are rounded after the rotary embedding, they are not; see `resolve_attention`.
    """
    has_cache = bool(config.kv_cache_post_rope and config.kv_cache_quant_config)
    if config.softmax_quant_spec is None and not has_cache and not config.attention_post_rope:
        return ()
    cached = [r for r in rows if first_match(r.name, config.kv_cache_quant_config) is not None] if has_cache else []
    asking = _query_rows(rows, architecture) if config.attention_post_rope else []
    facts = with_inferred_attention(architecture, model, (r.name for r in rows))
    found = []
    for name in _attentions(model, rows, architecture):
        states: dict[str, Any] = {}
        for state, projections, among in (
            ("key", facts.key_projections, cached),
            ("value", facts.value_projections, cached),
            ("query", facts.query_projections, asking),
        ):
            row = _projection(name, projections or (), among)
            if row is not None and row.config is not None and row.config.output_tensors is not None:
                states |= {state: row.config.output_tensors, f"{state}_layer": row.name}
        if config.softmax_quant_spec is not None or states:
            found.append(AttentionRow(name, config.softmax_quant_spec, **states))
    return tuple(found)


def resolve_attention(model: nn.Module, rows: Sequence[PlanRow], config: QConfig, architecture: Architecture | None) -> QConfig:
    """The configuration with ``kv_cache_post_rope`` and ``attention_post_rope`` as they hold for this model, where they are None.

    They are True, which is what runtimes compute, wherever attention can be reached and has the projections to itself.
    """
    cache, queries = config.kv_cache_post_rope, config.attention_post_rope
    if cache is None:
        cache = bool(_cached_rows(rows, config, architecture)) and why_before_rope(model, rows, config, architecture) is None
    if queries is None and config.softmax_quant_spec is not None:
        asked = attrs.evolve(config, kv_cache_post_rope=False, attention_post_rope=True)
        found = attention_rows(model, rows, asked, architecture)
        inside = {a.query_layer for a in found}
        outside = [r for r in _query_rows(rows, architecture) if r.name not in inside]
        queries = not outside and not any(_specs_not_per_tensor(found, QUERY))
    return attrs.evolve(config, kv_cache_post_rope=cache, attention_post_rope=queries)


def why_before_rope(model: nn.Module, rows: Sequence[PlanRow], config: QConfig, architecture: Architecture | None) -> str | None:
    """Returns why keys and values of the cache cannot be rounded as attention gets them, with the cure; None where they can be."""
    asked = attrs.evolve(config, kv_cache_post_rope=True, attention_post_rope=False)
    found = attention_rows(model, rows, asked, architecture)
    reason = next(_cache_errors(found, rows, asked, architecture), None)
    return reason or why_unswitchable(model, [a.name for a in found if a.states])


def attention_errors(
    model: nn.Module,
    attentions: Sequence[AttentionRow],
    rows: Sequence[PlanRow],
    config: QConfig,
    architecture: Architecture | None,
    asked: bool | None,
) -> Iterator[str]:
    """What of the configuration cannot be done to the attention modules of this model, with the cure.

    Args:
        model: Has them.
        attentions: What would be quantized of them.
        rows: The layers of the model.
        config: As resolved for this model.
        architecture: Facts about the family.
        asked: ``kv_cache_post_rope`` before it was resolved.
    """
    if config.softmax_quant_spec is not None:
        if not attentions:
            yield (
                "attention probabilities are to be quantized (softmax_quant_spec), but no attention module was found in this model: "
                "leave attention_scheme out, or register a template that names the model's q_layer_name and kv_layers_name"
            )
        yield from _not_per_tensor("softmax_quant_spec", config.softmax_quant_spec)
    if any(_specs_not_per_tensor(attentions, QUERY)):
        yield _wants_tensor_scale("output_tensors of queries with attention_post_rope")
    if config.kv_cache_post_rope:
        if not config.kv_cache_quant_config:
            yield (
                "kv_cache_post_rope says where keys of a quantized cache are rounded, but no cache is to be quantized: add kv_cache_scheme"
            )
        else:
            yield from _cache_errors(attentions, rows, config, architecture)
    elif asked is None:
        reason, norm = why_before_rope(model, rows, config, architecture), next(_key_norms(model, rows, config, architecture), None)
        if reason is not None and norm is not None:
            yield (
                f"keys pass the norm '{norm}' before they are cached, so that a scale of what the projection gives has nothing to do with "
                f"what runtimes keep, and they cannot be rounded behind it: {reason}. kv_cache_post_rope=False takes that scale all the "
                "same"
            )


def attention_warnings(
    model: nn.Module, rows: Sequence[PlanRow], config: QConfig, architecture: Architecture | None, asked: bool | None
) -> Iterator[str]:
    """What people should know of the scales of a quantized cache that are not those of what runtimes keep in it. Arguments as above."""
    cached = [r.name for r in _cached_rows(rows, config, architecture)]
    if config.kv_cache_post_rope or not cached:
        return
    norm = next(_key_norms(model, rows, config, architecture), None)
    where = f"{len(cached)} layers feed the quantized cache and are rounded as they put out: {folded(cached)}"
    if norm is not None:
        yield (
            f"{where}. Runtimes cache keys behind the norm '{norm}' and the rotary embedding, with which that scale has nothing to do: all "
            "keys may saturate. Leave kv_cache_post_rope out for a scale of what is cached"
        )
    elif asked is None:
        reason = why_before_rope(model, rows, config, architecture)
        yield f"{where}. Runtimes cache what attention gets, for which the scale may be too small. Attention is out of reach: {reason}"


def _cached_rows(rows: Iterable[PlanRow], config: QConfig, architecture: Architecture | None) -> list[PlanRow]:
    """The layers that feed the quantized cache. Only decoder blocks have one: what a pattern hits elsewhere is not quantized for it."""
    inside = _blocks(architecture)
    found = [r for r in rows if r.name.startswith(inside) and first_match(r.name, config.kv_cache_quant_config) is not None]
    parents = _outermost(r.name.rpartition(".")[0] for r in found)
    return [r for r in found if r.name.rpartition(".")[0] in parents]


def _query_rows(rows: Iterable[PlanRow], architecture: Architecture | None) -> list[PlanRow]:
    """The query projections of decoder blocks whose output is quantized."""
    patterns, inside = _query_patterns(architecture), _blocks(architecture)
    return [
        r
        for r in rows
        if r.name.startswith(inside) and r.config is not None and r.config.output_tensors is not None and first_match(r.name, patterns)
    ]


def _cache_errors(
    attentions: Sequence[AttentionRow], rows: Sequence[PlanRow], config: QConfig, architecture: Architecture | None
) -> Iterator[str]:
    served = {layer for row in attentions for layer, _ in row.states.values()}
    without = [r.name for r in _cached_rows(rows, config, architecture) if r.name not in served]
    if without:
        yield (
            f"keys cannot be quantized after the rotary embedding (kv_cache_post_rope): '{without[0]}' feeds the cache, and is no "
            "projection of an attention module that makes keys alone, or values alone. Leave kv_cache_post_rope out, or set it to False"
        )
    if any(_specs_not_per_tensor(attentions, KEY, VALUE)):
        yield _wants_tensor_scale("output_tensors of keys and values with kv_cache_post_rope")


def _key_norms(model: nn.Module, rows: Sequence[PlanRow], config: QConfig, architecture: Architecture | None) -> Iterator[str]:
    """Full names of norms that keys pass before they are cached."""
    norms = with_inferred_attention(architecture, model, (r.name for r in rows)).key_norms or ()
    for parent in dict.fromkeys(r.name.rpartition(".")[0] for r in _cached_rows(rows, config, architecture)):
        names = (f"{parent}.{child}" for child, _ in model.get_submodule(parent).named_children())
        yield from (name for name in names if _is_one_of(name, norms))


def _specs_not_per_tensor(attentions: Iterable[AttentionRow], *states: str) -> Iterator[TensorSpec]:
    for row in attentions:
        yield from (spec for state, (_, spec) in row.states.items() if state in states and not _is_per_tensor(spec))


def _is_per_tensor(spec: TensorSpec) -> bool:
    return all(s.qscheme is QSchemeType.per_tensor for s in levels(spec))


def _not_per_tensor(what: str, spec: TensorSpec) -> Iterator[str]:
    if not _is_per_tensor(spec):
        yield _wants_tensor_scale(what)


def _wants_tensor_scale(what: str) -> str:
    return (
        f"{what} wants one scale per tensor (qscheme per_tensor): inside attention, axes are not those of a layer's output. "
        "Take a scheme such as fp8"
    )


def _attentions(model: nn.Module, rows: Iterable[PlanRow], architecture: Architecture | None) -> list[str]:
    inside, patterns = _blocks(architecture), _projections(architecture)
    if not patterns:
        return attention_modules(n for n, _ in model.named_modules() if n.startswith(inside))
    parents = (r.name.rpartition(".")[0] for r in rows if r.name.startswith(inside) and first_match(r.name, patterns) is not None)
    return _outermost(p for p in parents if p)


def _outermost(names: Iterable[str]) -> list[str]:
    """Each of some modules that lies in none of the others: what chooses tokens inside attention has projections, too, and no cache."""
    found = dict.fromkeys(names)
    return [n for n in found if not any(".".join(n.split(".")[:i]) in found for i in range(1, n.count(".") + 1))]


def _blocks(architecture: Architecture | None) -> str:
    """What the full names of everything in decoder blocks begin with."""
    return "" if architecture is None or architecture.decoder_blocks is None else architecture.decoder_blocks + "."


def _projections(architecture: Architecture | None) -> list[str]:
    if architecture is None:
        return []
    return [*_query_patterns(architecture), *architecture.with_modules(architecture.kv_layers_name or ())]


def _query_patterns(architecture: Architecture | None) -> list[str]:
    if architecture is None:
        return []
    queries = architecture.q_layer_name or ()
    return architecture.with_modules((queries,) if isinstance(queries, str) else queries)


def _projection(attention: str, projections: Iterable[str], among: Iterable[PlanRow]) -> PlanRow | None:
    """The first of these rows that is one of the projections of an attention module; names of projections are relative to a block."""
    inside = (row for row in among if row.name.rpartition(".")[0] == attention)
    return next((row for row in inside if _is_one_of(row.name, projections)), None)


def _is_one_of(name: str, names_in_block: Iterable[str]) -> bool:
    return any(name == one or name.endswith(f".{one}") for one in names_in_block)


def attention_facts(attentions: Iterable[AttentionRow]) -> list[Mapping[str, object]]:
    """JSON form of the rows."""
    return [
        {
            "name": r.name,
            "probabilities": r.probabilities is not None,
            "keys_after_rotary_embedding": r.key_layer,
            "values_in_attention": r.value_layer,
            "queries_after_rotary_embedding": r.query_layer,
        }
        for r in attentions
    ]
