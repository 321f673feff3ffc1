"""Planning of attention: which probabilities, queries, keys and values are quantized."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import attrs
from torch import nn

from quark.base.names import folded
from quark.config.architecture import Architecture
from quark.config.layer import Slot, TensorSpec, levels
from quark.config.model import QConfig
from quark.config.tensor import QTensorConfig
from quark.models.hf.attention_switch import why_unswitchable
from quark.models.hf.internals import key_value_heads
from quark.models.layers.attention import KEY, QUERY, VALUE
from quark.models.plan.inferred_architecture import attention_modules, gives_queries_keys_and_values, with_inferred_attention
from quark.models.plan.kv_scales import is_per_head, is_per_tensor, why_not_cached
from quark.models.plan.plan_row import PlanRow
from quark.models.plan.rules import first_match


@attrs.frozen
class AttentionRow:
    """One attention module with at least one quantized tensor.

    Keys, values and queries are quantized as attention receives them, after per-head norms and the rotary
    embedding. This replaces the output quantization of the projection that produces them.

    Attributes:
        name: Full module name.
        probabilities: Spec of the softmax output; None if it stays float.
        key: Spec of the keys; None if they are not quantized inside attention.
        key_layer: Full name of the projection whose output quantization ``key`` replaces; None if ``key`` is
            None.
        value, value_layer: The same for the values.
        query, query_layer: The same for the queries.
        fused: Whether one projection gives queries, keys and values, such as ``qkv_proj``. Then their scales
            are stored with the attention module, not with the projection.
        heads: Number of heads of keys and values, and elements of a head of keys; None if they are not known.
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
    heads: tuple[int, int] | None = None

    @property
    def states(self) -> dict[str, tuple[str, TensorSpec]]:
        """The projection and the spec of each quantized state, by a name of ``attention.STATES``."""
        states = {QUERY: (self.query_layer, self.query), KEY: (self.key_layer, self.key), VALUE: (self.value_layer, self.value)}
        return {name: (layer, spec) for name, (layer, spec) in states.items() if layer is not None and spec is not None}

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The shape of one token's keys: ``[1, heads, 1, elements]``, or ``[1]`` if heads are unknown."""
        return (1,) if self.heads is None else (1, self.heads[0], 1, self.heads[1])

    def to_dict(self) -> dict[str, object]:
        """Return the row in JSON form."""
        return {
            "name": self.name,
            "probabilities": self.probabilities is not None,
            "keys_after_rotary_embedding": self.key_layer,
            "values_in_attention": self.value_layer,
            "queries_after_rotary_embedding": self.query_layer,
        }


def attention_rows(
    model: nn.Module, layers: Sequence[PlanRow], config: QConfig, architecture: Architecture | None
) -> tuple[AttentionRow, ...]:
    """Return the `AttentionRow` of each attention module in which ``config`` quantizes a tensor.

    They are in the model's order. Nothing is checked.
    """
    return AttentionPlanning(model, layers, config, architecture).rows


@attrs.frozen(eq=False, slots=False)
class AttentionPlanning:
    """The attention of one model under one configuration: its rows, errors and warnings.

    Attention modules are the parents of the query, key and value projections that the architecture names.
    Without such names, they are the modules called ``…attn`` or ``…attention``. ``exclude`` applies to
    layers, not to attention modules.

    Attributes:
        model: The model.
        layers: The rows of its layers.
        config: The configuration. If ``kv_cache_post_rope`` or ``attention_post_rope`` is None, it counts as
            False; `resolved` replaces None.
        architecture: Facts about the family; None if nothing is known.
    """

    model: nn.Module
    layers: Sequence[PlanRow]
    config: QConfig
    architecture: Architecture | None

    @cached_property
    def rows(self) -> tuple[AttentionRow, ...]:
        """The attention modules with quantized tensors, in the model's order."""
        config, facts = self.config, self._facts
        has_cache = bool(config.kv_cache_post_rope and config.kv_cache_quant_config)
        if config.softmax_quant_spec is None and not has_cache and not config.attention_post_rope:
            return ()
        cached = [r for r in self.layers if first_match(r.name, config.kv_cache_quant_config) is not None]
        queries = self._queries if config.attention_post_rope else []
        if not has_cache:
            # A fused projection has one output quantizer: while it rounds keys and values, it rounds queries
            # too.
            queries, cached = [r for r in queries if r not in cached], []
        fused_rows = {_parent(r.name): r for r in (*cached, *queries) if _is_fused(r.name, facts)}
        attentions = []
        for name in self._modules:
            states: dict[str, Any] = {}
            fused = fused_rows.get(name)
            for state, projections, candidates in (
                ("key", facts.key_projections, cached),
                ("value", facts.value_projections, cached),
                ("query", facts.query_projections, queries),
            ):
                row = _projection(name, projections or (), candidates) or (fused if fused in candidates else None)
                if row is not None and row.config is not None and row.config.output_tensors is not None:
                    states |= {state: row.config.output_tensors, f"{state}_layer": row.name}
            if config.softmax_quant_spec is not None or states:
                heads = self._heads(name, states.get("key_layer") if fused is None else None)
                attentions.append(AttentionRow(name, config.softmax_quant_spec, **states, fused=fused is not None, heads=heads))
        return tuple(attentions)

    def resolved(self) -> AttentionPlanning:
        """Return this planning, with ``kv_cache_post_rope`` and ``attention_post_rope`` resolved.

        A value of None becomes True, as in runtimes, if attention can be switched to our implementation and
        each projection produces only keys, values or queries.
        """
        cache, queries = self.config.kv_cache_post_rope, self.config.attention_post_rope
        if cache is None:
            cache = bool(self._cached) and self._why_before_rope is None
        if queries is None and self.config.softmax_quant_spec is not None:
            inside = self._with(cache, True)
            in_attention = {a.query_layer for a in inside.rows}
            elsewhere = [r for r in self._queries if r.name not in in_attention]
            queries = not elsewhere and inside._have_tensor_scales(QUERY)
        return self._with(cache, queries)

    def errors(self, requested_post_rope: bool | None) -> Iterator[str]:
        """Yield one error message for each attention setting that this model does not allow, with the fix.

        Args:
            requested_post_rope: ``kv_cache_post_rope`` before it was resolved.
        """
        probabilities = self.config.softmax_quant_spec
        if probabilities is not None:
            if not self.rows:
                yield (
                    "softmax_quant_spec quantizes attention probabilities, but no attention module was found in this model: "
                    "leave attention_scheme out, or register a template that names the model's q_layer_name and kv_layers_name"
                )
            if not is_per_tensor(probabilities):
                yield _wants_tensor_scale("softmax_quant_spec")
        if not self._have_tensor_scales(QUERY):
            yield _wants_tensor_scale("output_tensors of queries with attention_post_rope")
        if not self.config.kv_cache_post_rope and (outputs := self._outputs_without_heads(requested_post_rope)):
            yield (
                f"the cache has several scales, but {folded(outputs)} would be rounded at the projection's output, which has no axis of "
                f"heads: {self._why_before_rope or 'kv_cache_post_rope is False'}. Use a cache with one scale per tensor, such as fp8"
            )
        if self.config.kv_cache_post_rope:
            if not self.config.kv_cache_quant_config:
                yield (
                    "kv_cache_post_rope says where keys of a quantized cache are rounded, but the cache is not quantized: "
                    "add kv_cache_scheme"
                )
            else:
                yield from self._cache_errors()
        elif requested_post_rope is None:
            reason, norm = self._why_before_rope, self._key_norm
            if others := self._neither_keys_nor_values:
                yield _not_what_is_cached(others)
            elif reason is not None and norm is not None:
                yield (
                    f"keys pass the norm '{norm}' before they are cached, so a scale of the projection's output does not fit the cached "
                    f"keys, and they cannot be rounded after the norm: {reason}. To use that scale anyway, set "
                    "kv_cache_post_rope=False"
                )

    def warnings(self, requested_post_rope: bool | None) -> Iterator[str]:
        """Yield warnings about scales of the KV cache that do not fit the values that runtimes cache.

        Args:
            requested_post_rope: As in `errors`.
        """
        cached = [r.name for r in self._cached]
        if self.config.kv_cache_post_rope or not cached:
            return
        where = f"{len(cached)} layers feed the quantized cache and are rounded at the projection's output: {folded(cached)}"
        if others := self._neither_keys_nor_values:
            yield f"{where}. {_not_what_is_cached(others)}"
        elif self._key_norm is not None:
            yield (
                f"{where}. Runtimes cache keys after the norm '{self._key_norm}' and the rotary embedding, so this scale does not fit: "
                "all keys may saturate. Leave kv_cache_post_rope out to calibrate a scale of the cached keys"
            )
        elif requested_post_rope is None:
            yield (
                f"{where}. Runtimes cache keys after the rotary embedding, for which the scale may be too small. The reason: "
                f"{self._why_before_rope}"
            )
        if any(_is_fused(name, self._facts) for name in cached):
            yield f"{where}. vLLM has no name for the scale of a fused projection's output, and does not load it"

    def _with(self, cache: bool | None, queries: bool | None) -> AttentionPlanning:
        """Return this planning with these values of ``kv_cache_post_rope`` and ``attention_post_rope``."""
        return attrs.evolve(self, config=attrs.evolve(self.config, kv_cache_post_rope=cache, attention_post_rope=queries))

    @cached_property
    def _facts(self) -> Architecture:
        return with_inferred_attention(self.architecture, self.model, (r.name for r in self.layers))

    @cached_property
    def _in_blocks(self) -> list[PlanRow]:
        """The layers in decoder blocks; all layers if the blocks are not known."""
        return [r for r in self.layers if r.name.startswith(self._blocks)]

    @property
    def _blocks(self) -> str:
        """The prefix of all full names in decoder blocks; empty if the blocks are not known."""
        blocks = None if self.architecture is None else self.architecture.decoder_blocks
        return "" if blocks is None else f"{blocks}."

    @cached_property
    def _modules(self) -> list[str]:
        """Full names of the attention modules."""
        facts = self.architecture
        patterns = [] if facts is None else [*self._query_patterns, *facts.with_modules(facts.kv_layers_name or ())]
        if not patterns:
            return attention_modules(n for n, _ in self.model.named_modules() if n.startswith(self._blocks))
        parents = (_parent(r.name) for r in self._in_blocks if first_match(r.name, patterns) is not None)
        return _outermost(parent for parent in parents if parent)

    @property
    def _query_patterns(self) -> list[str]:
        if self.architecture is None:
            return []
        queries = self.architecture.q_layer_name or ()
        return self.architecture.with_modules((queries,) if isinstance(queries, str) else queries)

    @cached_property
    def _queries(self) -> list[PlanRow]:
        """The query projections of decoder blocks whose output is quantized."""
        quantized = [r for r in self._in_blocks if r.config is not None and r.config.output_tensors is not None]
        return [r for r in quantized if first_match(r.name, self._query_patterns)]

    @cached_property
    def _cached(self) -> list[PlanRow]:
        """The layers that feed the quantized cache.

        Only decoder blocks have a cache: matches outside them are ignored.
        """
        matches = [r for r in self._in_blocks if first_match(r.name, self.config.kv_cache_quant_config) is not None]
        parents = _outermost(_parent(r.name) for r in matches)
        return [r for r in matches if _parent(r.name) in parents]

    @cached_property
    def _neither_keys_nor_values(self) -> list[str]:
        """The layers that feed the quantized cache, but give neither keys, nor values, nor both fused.

        An example is ``kv_b_proj`` of latent attention. The list is empty if the names of projections are
        inferred.
        """
        facts = self.architecture
        if facts is None or facts.key_projections is None or facts.value_projections is None:
            return []
        alone = (*facts.key_projections, *facts.value_projections)
        return [r.name for r in self._cached if not _is_one_of(r.name, alone) and not _is_fused(r.name, facts)]

    @cached_property
    def _key_norm(self) -> str | None:
        """The full name of the first norm that keys pass before they are cached."""
        parents = dict.fromkeys(_parent(r.name) for r in self._cached)
        children = (f"{parent}.{name}" for parent in parents for name, _ in self.model.get_submodule(parent).named_children())
        return next((child for child in children if _is_one_of(child, self._facts.key_norms or ())), None)

    @cached_property
    def _why_before_rope(self) -> str | None:
        """Why keys and values of the cache cannot be rounded inside attention, with the fix; or None."""
        after_rope = self._with(True, False)
        reason = next(after_rope._cache_errors(), None)
        return reason or why_unswitchable(self.model, [a.name for a in after_rope.rows if a.states])

    def _cache_errors(self) -> Iterator[str]:
        covered = {layer for row in self.rows for layer, _ in row.states.values()}
        missing = [r.name for r in self._cached if r.name not in covered]
        if others := self._neither_keys_nor_values:
            yield _not_what_is_cached(others)
        elif missing:
            yield (
                f"keys cannot be quantized after the rotary embedding (kv_cache_post_rope): '{missing[0]}' feeds the cache, but is not a "
                "projection of an attention module that gives keys alone, values alone, or both with queries. Leave kv_cache_post_rope "
                "out, or set it to False"
            )
        cached = [(row, spec) for row in self.rows for state, (_, spec) in row.states.items() if state in (KEY, VALUE)]
        reasons = ((row.name, why_not_cached(spec, row.heads)) for row, spec in cached)
        if (reason := next((f"{reason} ('{name}')" for name, reason in reasons if reason is not None), None)) is not None:
            yield f"output_tensors of keys and values with kv_cache_post_rope {reason}. Use a scheme such as fp8"

    def _heads(self, attention: str, key_layer: str | None) -> tuple[int, int] | None:
        """Return `AttentionRow.heads` of a module; ``key_layer`` gives only its keys, or is None."""
        shapes = {row.name: row.shapes for row in self.layers if row.name == key_layer}
        width = shapes[key_layer].of_slot(Slot.output_tensors)[-1] if key_layer in shapes else None
        return key_value_heads(self.model.get_submodule(attention), width)

    def _outputs_without_heads(self, requested_post_rope: bool | None) -> list[str]:
        """Return the layers that feed the cache with several scales, which only fit tensors inside attention.

        Dynamic scales of outputs, as in AMD Quark, are allowed if ``kv_cache_post_rope`` is False.
        """
        specs = {r.name: r.config.output_tensors for r in self._cached if r.config is not None and r.config.output_tensors is not None}
        is_requested = requested_post_rope is False
        return [
            name
            for name, spec in specs.items()
            if not is_per_tensor(spec) and not (is_requested and all(level.is_dynamic or not is_per_head(level) for level in levels(spec)))
        ]

    def _have_tensor_scales(self, *states: str) -> bool:
        """Return whether these states have one scale per tensor in every attention module."""
        return all(is_per_tensor(spec) for row in self.rows for state, (_, spec) in row.states.items() if state in states)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _wants_tensor_scale(subject: str) -> str:
    return (
        f"{subject} must have one scale per tensor (qscheme per_tensor): inside attention, tensors have other axes than a layer's output. "
        "Use a scheme such as fp8"
    )


def _not_what_is_cached(layers: Sequence[str]) -> str:
    return (
        f"The output of {folded(layers)} is neither keys, nor values, nor both with queries, so runtimes do not cache it: with latent "
        "attention (MLA) they cache the normed latent and the rotated part of the keys, and vLLM does not load a scale of this output. "
        "Leave kv_cache_scheme out and start vLLM with --kv-cache-dtype fp8, or set kv_cache_post_rope=False to round these outputs as "
        "AMD Quark does"
    )


def _outermost(names: Iterable[str]) -> list[str]:
    """Return the modules that are not inside another one.

    A token indexer inside attention has projections too, but no cache.
    """
    unique = dict.fromkeys(names)
    return [n for n in unique if not any(".".join(n.split(".")[:i]) in unique for i in range(1, n.count(".") + 1))]


def _projection(attention: str, projections: Iterable[str], among: Iterable[PlanRow]) -> PlanRow | None:
    """Return the first row that is one of the projections of an attention module.

    Projection names are relative to a decoder block.
    """
    inside = (row for row in among if _parent(row.name) == attention)
    return next((row for row in inside if _is_one_of(row.name, projections)), None)


def _is_fused(name: str, facts: Architecture) -> bool:
    alone = (*(facts.query_projections or ()), *(facts.key_projections or ()), *(facts.value_projections or ()))
    return gives_queries_keys_and_values(name, facts) and not _is_one_of(name, alone)


def _is_one_of(name: str, names_in_block: Iterable[str]) -> bool:
    return any(name == one or name.endswith(f".{one}") for one in names_in_block)
