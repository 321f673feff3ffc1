"""Planning of attention: which probabilities, queries, keys and values are quantized."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
from torch import nn

from quark.base.names import folded
from quark.config.architecture import Architecture
from quark.config.enums import QSchemeType
from quark.config.layer import TensorSpec, levels
from quark.config.model import QConfig
from quark.config.tensor import QTensorConfig
from quark.models.hf.attention_switch import why_unswitchable
from quark.models.layers.attention import KEY, QUERY, VALUE
from quark.models.plan.inferred_architecture import attention_modules, gives_queries_keys_and_values, with_inferred_attention
from quark.models.plan.plan_row import PlanRow
from quark.models.plan.rules import first_match

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
    """One attention module with at least one quantized tensor.

    Keys, values and queries are quantized as attention receives them, after per-head norms and the rotary
    embedding. This replaces the output quantization of the projection that produces them.

    Attributes:
        name: Full module name.
        probabilities: Spec of the softmax output; None where it stays float.
        key: Spec of the keys; None where they are not quantized inside attention.
        key_layer: Full name of the projection whose output quantization ``key`` replaces; None where ``key``
            is None.
        value, value_layer: The same for the values.
        query, query_layer: The same for the queries.
        fused: Whether these projections are one, which gives queries, keys and values, such as ``qkv_proj``.
            Their scales are stored with the attention module then, and not with the projection.
    """

    name: str
    probabilities: QTensorConfig | None = None
    key: TensorSpec | None = None
    key_layer: str | None = None
    value: TensorSpec | None = None
    value_layer: str | None = None
    query: TensorSpec | None = None
    query_layer: str | None = None
    fused: bool = False

    @property
    def states(self) -> dict[str, tuple[str, TensorSpec]]:
        """The projection and the spec of each quantized state, by a name of ``attention.STATES``."""
        states = {QUERY: (self.query_layer, self.query), KEY: (self.key_layer, self.key), VALUE: (self.value_layer, self.value)}
        return {name: (layer, spec) for name, (layer, spec) in states.items() if layer is not None and spec is not None}


def attention_rows(
    model: nn.Module, rows: Sequence[PlanRow], config: QConfig, architecture: Architecture | None
) -> tuple[AttentionRow, ...]:
    """Return the attention modules of ``model`` in which ``config`` quantizes a tensor, in the model's order.

    Nothing is checked.

    Attention modules are the parents of the query, key and value projections that the architecture names;
    without such names, modules called ``…attn`` or ``…attention``. ``exclude`` applies to layers and not to
    attention modules. Where ``kv_cache_post_rope`` or ``attention_post_rope`` is None, it counts as False;
    `resolve_attention` replaces None first.
    """
    has_cache = bool(config.kv_cache_post_rope and config.kv_cache_quant_config)
    if config.softmax_quant_spec is None and not has_cache and not config.attention_post_rope:
        return ()
    cached = [r for r in rows if first_match(r.name, config.kv_cache_quant_config) is not None]
    query_rows = _query_rows(rows, architecture) if config.attention_post_rope else []
    if not has_cache:
        # A fused projection has one output quantizer: while that rounds keys and values, it rounds queries
        # too.
        query_rows, cached = [r for r in query_rows if r not in cached], []
    facts = with_inferred_attention(architecture, model, (r.name for r in rows))
    fused_rows = {r.name.rpartition(".")[0]: r for r in (*cached, *query_rows) if _is_fused(r.name, facts)}
    attentions = []
    for name in _attentions(model, rows, architecture):
        states: dict[str, Any] = {}
        fused = fused_rows.get(name)
        for state, projections, candidates in (
            ("key", facts.key_projections, cached),
            ("value", facts.value_projections, cached),
            ("query", facts.query_projections, query_rows),
        ):
            row = _projection(name, projections or (), candidates) or (fused if fused in candidates else None)
            if row is not None and row.config is not None and row.config.output_tensors is not None:
                states |= {state: row.config.output_tensors, f"{state}_layer": row.name}
        if config.softmax_quant_spec is not None or states:
            attentions.append(AttentionRow(name, config.softmax_quant_spec, **states, fused=fused is not None))
    return tuple(attentions)


def resolve_attention(model: nn.Module, rows: Sequence[PlanRow], config: QConfig, architecture: Architecture | None) -> QConfig:
    """Return the configuration with ``kv_cache_post_rope`` and ``attention_post_rope`` resolved.

    They are resolved for this model where they are None.

    They become True, which matches what runtimes compute, wherever attention can be switched to our
    implementation and each projection produces keys, values or queries alone.
    """
    cache, queries = config.kv_cache_post_rope, config.attention_post_rope
    if cache is None:
        cache = bool(_cached_rows(rows, config, architecture)) and why_before_rope(model, rows, config, architecture) is None
    if queries is None and config.softmax_quant_spec is not None:
        after_rope = attrs.evolve(config, kv_cache_post_rope=cache, attention_post_rope=True)
        attentions = attention_rows(model, rows, after_rope, architecture)
        in_attention = {a.query_layer for a in attentions}
        elsewhere = [r for r in _query_rows(rows, architecture) if r.name not in in_attention]
        queries = not elsewhere and not any(_specs_not_per_tensor(attentions, QUERY))
    return attrs.evolve(config, kv_cache_post_rope=cache, attention_post_rope=queries)


def why_before_rope(model: nn.Module, rows: Sequence[PlanRow], config: QConfig, architecture: Architecture | None) -> str | None:
    """Return why keys and values of the cache cannot be rounded inside attention, with the fix.

    None where they can be.
    """
    attentions = _after_rope(model, rows, config, architecture)
    reason = next(_cache_errors(attentions, rows, config, architecture), None)
    return reason or why_unswitchable(model, [a.name for a in attentions if a.states])


def attention_errors(
    model: nn.Module,
    attentions: Sequence[AttentionRow],
    rows: Sequence[PlanRow],
    config: QConfig,
    architecture: Architecture | None,
    asked: bool | None,
) -> Iterator[str]:
    """Yield one error message for each attention setting that this model does not allow, with the fix.

    Args:
        model: The model that contains the attention modules.
        attentions: Rows of the attention modules, from `attention_rows`.
        rows: The layers of the model.
        config: As resolved for this model.
        architecture: Facts about the family.
        asked: ``kv_cache_post_rope`` before it was resolved.
    """
    if config.softmax_quant_spec is not None:
        if not attentions:
            yield (
                "softmax_quant_spec quantizes attention probabilities, but no attention module was found in this model: "
                "leave attention_scheme out, or register a template that names the model's q_layer_name and kv_layers_name"
            )
        yield from _not_per_tensor("softmax_quant_spec", config.softmax_quant_spec)
    if any(_specs_not_per_tensor(attentions, QUERY)):
        yield _wants_tensor_scale("output_tensors of queries with attention_post_rope")
    if config.kv_cache_post_rope:
        if not config.kv_cache_quant_config:
            yield (
                "kv_cache_post_rope says where keys of a quantized cache are rounded, but the cache is not quantized: add kv_cache_scheme"
            )
        else:
            yield from _cache_errors(attentions, rows, config, architecture)
    elif asked is None:
        reason, norm = why_before_rope(model, rows, config, architecture), next(_key_norms(model, rows, config, architecture), None)
        if others := _neither_keys_nor_values(rows, config, architecture):
            yield _not_what_is_cached(others)
        elif reason is not None and norm is not None:
            yield (
                f"keys pass the norm '{norm}' before they are cached, so that a scale of the projection's output does not fit the keys "
                f"that runtimes cache, and they cannot be rounded after the norm: {reason}. kv_cache_post_rope=False uses that scale anyway"
            )


def attention_warnings(
    model: nn.Module, rows: Sequence[PlanRow], config: QConfig, architecture: Architecture | None, asked: bool | None
) -> Iterator[str]:
    """Yield warnings about KV-cache scales of other values than runtimes cache.

    Arguments as for `attention_errors`.
    """
    cached = [r.name for r in _cached_rows(rows, config, architecture)]
    if config.kv_cache_post_rope or not cached:
        return
    norm = next(_key_norms(model, rows, config, architecture), None)
    facts = with_inferred_attention(architecture, model, (r.name for r in rows))
    where = f"{len(cached)} layers feed the quantized cache and are rounded at the projection's output: {folded(cached)}"
    if others := _neither_keys_nor_values(rows, config, architecture):
        yield f"{where}. {_not_what_is_cached(others)}"
    elif norm is not None:
        yield (
            f"{where}. Runtimes cache keys after the norm '{norm}' and the rotary embedding, which that scale does not fit: all keys may "
            "saturate. Leave kv_cache_post_rope out for a scale of the cached keys"
        )
    elif asked is None:
        reason = why_before_rope(model, rows, config, architecture)
        yield f"{where}. Runtimes cache keys after the rotary embedding, for which the scale may be too small. The reason: {reason}"
    if any(_is_fused(name, facts) for name in cached):
        yield f"{where}. vLLM has no name for the scale of a fused projection's output, and does not load it"


def _cached_rows(rows: Iterable[PlanRow], config: QConfig, architecture: Architecture | None) -> list[PlanRow]:
    """Return the layers that feed the quantized cache.

    Only decoder blocks have a cache: matches outside them are left out.
    """
    prefix = _blocks(architecture)
    matches = [r for r in rows if r.name.startswith(prefix) and first_match(r.name, config.kv_cache_quant_config) is not None]
    parents = _outermost(r.name.rpartition(".")[0] for r in matches)
    return [r for r in matches if r.name.rpartition(".")[0] in parents]


def _query_rows(rows: Iterable[PlanRow], architecture: Architecture | None) -> list[PlanRow]:
    """Return the query projections of decoder blocks whose output is quantized."""
    patterns, prefix = _query_patterns(architecture), _blocks(architecture)
    return [
        r
        for r in rows
        if r.name.startswith(prefix) and r.config is not None and r.config.output_tensors is not None and first_match(r.name, patterns)
    ]


def _cache_errors(
    attentions: Sequence[AttentionRow], rows: Sequence[PlanRow], config: QConfig, architecture: Architecture | None
) -> Iterator[str]:
    covered = {layer for row in attentions for layer, _ in row.states.values()}
    missing = [r.name for r in _cached_rows(rows, config, architecture) if r.name not in covered]
    if others := _neither_keys_nor_values(rows, config, architecture):
        yield _not_what_is_cached(others)
    elif missing:
        yield (
            f"keys cannot be quantized after the rotary embedding (kv_cache_post_rope): '{missing[0]}' feeds the cache, and is no "
            "projection of an attention module that gives keys alone, values alone, or both with queries. Leave kv_cache_post_rope out, or "
            "set it to False"
        )
    if any(_specs_not_per_tensor(attentions, KEY, VALUE)):
        yield _wants_tensor_scale("output_tensors of keys and values with kv_cache_post_rope")


def _after_rope(model: nn.Module, rows: Sequence[PlanRow], config: QConfig, architecture: Architecture | None) -> tuple[AttentionRow, ...]:
    """Return the attention modules with keys and values cached behind the rotary embedding.

    No queries are quantized there.
    """
    after_rope = attrs.evolve(config, kv_cache_post_rope=True, attention_post_rope=False)
    return attention_rows(model, rows, after_rope, architecture)


def _neither_keys_nor_values(rows: Sequence[PlanRow], config: QConfig, architecture: Architecture | None) -> list[str]:
    """Return the layers that feed the quantized cache, and give neither keys, values, nor both fused.

    Such as ``kv_b_proj`` of latent attention. Where projections are inferred from names, nothing is known of
    the others.
    """
    if architecture is None or architecture.key_projections is None or architecture.value_projections is None:
        return []
    alone = (*architecture.key_projections, *architecture.value_projections)
    names = [r.name for r in _cached_rows(rows, config, architecture)]
    return [name for name in names if not _is_one_of(name, alone) and not _is_fused(name, architecture)]


def _not_what_is_cached(layers: Sequence[str]) -> str:
    return (
        f"The output of {folded(layers)} is not what runtimes cache: it is neither keys alone, nor values alone, nor both with queries. "
        "With latent attention (MLA), runtimes cache the normed latent and the rotated part of the keys; vLLM reads no scale of them from "
        "checkpoints of AMD Quark, and does not load the scale of such an output. Leave kv_cache_scheme out: vLLM caches in FP8 all the "
        "same if it is started so (--kv-cache-dtype fp8). kv_cache_post_rope=False rounds these outputs, AMD Quark's convention"
    )


def _key_norms(model: nn.Module, rows: Sequence[PlanRow], config: QConfig, architecture: Architecture | None) -> Iterator[str]:
    """Yield the full names of norms that keys pass before they are cached."""
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
        f"{what} must have one scale per tensor (qscheme per_tensor): inside attention, axes are not those of a layer's output. "
        "Use a scheme such as fp8"
    )


def _attentions(model: nn.Module, rows: Iterable[PlanRow], architecture: Architecture | None) -> list[str]:
    prefix, patterns = _blocks(architecture), _projections(architecture)
    if not patterns:
        return attention_modules(n for n, _ in model.named_modules() if n.startswith(prefix))
    parents = (r.name.rpartition(".")[0] for r in rows if r.name.startswith(prefix) and first_match(r.name, patterns) is not None)
    return _outermost(p for p in parents if p)


def _outermost(names: Iterable[str]) -> list[str]:
    """Return the modules that are inside none of the others.

    A token indexer inside attention has projections too, but no cache.
    """
    unique = dict.fromkeys(names)
    return [n for n in unique if not any(".".join(n.split(".")[:i]) in unique for i in range(1, n.count(".") + 1))]


def _blocks(architecture: Architecture | None) -> str:
    """Return the prefix of all full names in decoder blocks; empty where the blocks are not known."""
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
    """Return the first row that is one of the projections of an attention module.

    Projection names are relative to a decoder block.
    """
    inside = (row for row in among if row.name.rpartition(".")[0] == attention)
    return next((row for row in inside if _is_one_of(row.name, projections)), None)


def _is_fused(name: str, facts: Architecture) -> bool:
    alone = (*(facts.query_projections or ()), *(facts.key_projections or ()), *(facts.value_projections or ()))
    return gives_queries_keys_and_values(name, facts) and not _is_one_of(name, alone)


def _is_one_of(name: str, names_in_block: Iterable[str]) -> bool:
    return any(name == one or name.endswith(f".{one}") for one in names_in_block)


def attention_facts(attentions: Iterable[AttentionRow]) -> list[Mapping[str, object]]:
    """Return the rows in JSON form."""
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
