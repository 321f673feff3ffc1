"""Code that decides which attention probabilities, queries, keys and values of a model are quantized."""

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
    """The plan of one attention module with at least one quantized tensor.

    Queries, keys and values are quantized inside attention, after per-head norms and the rotary embedding.
    The outputs of the projections that compute them are then not quantized.

    Attributes:
        name: Full name of the attention module.
        probabilities: Spec of the softmax output. None means that the softmax output stays float.
        key: Spec of the keys. None means that keys are not quantized inside attention.
        key_layer: Full name of the projection that computes the keys. ``key`` replaces the quantization of
            its output. None if ``key`` is None.
        value, value_layer: Like ``key`` and ``key_layer``, but for the values.
        query, query_layer: Like ``key`` and ``key_layer``, but for the queries.
        fused: Whether a single projection, such as ``qkv_proj``, computes queries, keys and values. If so,
            the scales are stored with the attention module and not with the projection.
        heads: A pair: the number of key heads, which is also the number of value heads, and the number of
            elements of a key head. None if these numbers are unknown.
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
        """A dictionary from a name in ``STATES`` to a pair: the full name of the projection, and the spec."""
        states = {QUERY: (self.query_layer, self.query), KEY: (self.key_layer, self.key), VALUE: (self.value_layer, self.value)}
        return {name: (layer, spec) for name, (layer, spec) in states.items() if layer is not None and spec is not None}

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The shape of the keys of one token: ``[1, heads, 1, elements]``, or ``[1]`` if `heads` is None."""
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

    The rows are in the order of the model's modules. The function does not check the configuration.
    """
    return AttentionPlanning(model, layers, config, architecture).rows


@attrs.frozen(eq=False, slots=False)
class AttentionPlanning:
    """A planner of attention in one model. It finds attention rows, errors and warnings.

    Attention modules are the parents of the query, key and value projections that the architecture names. If
    the architecture names no projections, the attention modules are the modules whose names end in ``attn``
    or ``attention``. The field ``exclude`` of the configuration applies to layers, not to attention modules.

    Attributes:
        model: The model.
        layers: The plan rows of the layers of the model.
        config: The configuration. If ``kv_cache_post_rope`` or ``attention_post_rope`` is None, it means
            False here. `resolved` replaces None by True or False.
        architecture: Facts about the model family. None means that the family is unknown.
    """

    model: nn.Module
    layers: Sequence[PlanRow]
    config: QConfig
    architecture: Architecture | None

    @cached_property
    def rows(self) -> tuple[AttentionRow, ...]:
        """The `AttentionRow` of each attention module with quantized tensors, in the order of the modules."""
        config, facts = self.config, self._facts
        has_cache = bool(config.kv_cache_post_rope and config.kv_cache_quant_config)
        if config.softmax_quant_spec is None and not has_cache and not config.attention_post_rope:
            return ()
        cached = [r for r in self.layers if first_match(r.name, config.kv_cache_quant_config) is not None]
        queries = self._queries if config.attention_post_rope else []
        if not has_cache:
            # The output quantizer of a fused projection rounds queries together with keys and values.
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
        """Return a copy in which None in ``kv_cache_post_rope`` and ``attention_post_rope`` is replaced.

        The new value is True if the model can use quark's attention functions, and attention can quantize the
        outputs of the projections. Otherwise, it is False. True is better, because runtimes quantize after
        the rotary embedding too.
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
        """Yield an error message and a fix for each setting of attention that this model does not allow.

        Args:
            requested_post_rope: The value of ``kv_cache_post_rope`` before `resolved` replaced it.
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
                f"heads. The reason: {self._why_before_rope or 'kv_cache_post_rope is False'}. Use one scale per tensor, such as with fp8"
            )
        if self.config.kv_cache_post_rope:
            if not self.config.kv_cache_quant_config:
                yield (
                    "kv_cache_post_rope says where keys of a quantized cache are rounded, but the cache is not quantized. "
                    "Add kv_cache_scheme, or leave kv_cache_post_rope out"
                )
            else:
                yield from self._cache_errors()
        elif requested_post_rope is None:
            reason, norm = self._why_before_rope, self._key_norm
            if others := self._neither_keys_nor_values:
                yield _not_what_is_cached(others)
            elif reason is not None and norm is not None:
                yield (
                    f"the norm '{norm}' changes keys before they are cached, so a scale of the projection's output does not fit the "
                    f"cached keys. They cannot be rounded after the norm. The reason: {reason}. To use the scale of the output anyway, "
                    "set kv_cache_post_rope=False"
                )

    def warnings(self, requested_post_rope: bool | None) -> Iterator[str]:
        """Yield a warning if scales of the KV cache do not fit the keys and values that runtimes cache.

        Args:
            requested_post_rope: The value of ``kv_cache_post_rope`` before `resolved` replaced it.
        """
        cached = [r.name for r in self._cached]
        if self.config.kv_cache_post_rope or not cached:
            return
        where = f"{len(cached)} layers feed the quantized cache and are rounded at the projection's output: {folded(cached)}"
        if others := self._neither_keys_nor_values:
            yield f"{where}. {_not_what_is_cached(others)}"
        elif self._key_norm is not None:
            yield (
                f"{where}. Runtimes cache keys after the norm '{self._key_norm}' and the rotary embedding, so the scale of the output does "
                "not fit, and all keys may saturate. Leave kv_cache_post_rope out to calibrate a scale of the cached keys"
            )
        elif requested_post_rope is None:
            yield (
                f"{where}. Runtimes cache keys after the rotary embedding, so the scale of the output may be too small. Keys cannot be "
                f"rounded after the rotary embedding. The reason: {self._why_before_rope}"
            )
        if any(_is_fused(name, self._facts) for name in cached):
            yield f"{where}. vLLM has no name for the scale of a fused projection's output, so vLLM does not load this scale"

    def _with(self, cache: bool | None, queries: bool | None) -> AttentionPlanning:
        """Return a copy with new values of ``kv_cache_post_rope`` and ``attention_post_rope``."""
        return attrs.evolve(self, config=attrs.evolve(self.config, kv_cache_post_rope=cache, attention_post_rope=queries))

    @cached_property
    def _facts(self) -> Architecture:
        return with_inferred_attention(self.architecture, self.model, (r.name for r in self.layers))

    @cached_property
    def _in_blocks(self) -> list[PlanRow]:
        """The rows of the layers in decoder blocks. If the blocks are unknown, these are all rows."""
        return [r for r in self.layers if r.name.startswith(self._blocks)]

    @property
    def _blocks(self) -> str:
        """The prefix of the names of layers in decoder blocks. It is ``""`` if the blocks are unknown."""
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
        """The rows of those query projections in decoder blocks whose output is quantized."""
        quantized = [r for r in self._in_blocks if r.config is not None and r.config.output_tensors is not None]
        return [r for r in quantized if first_match(r.name, self._query_patterns)]

    @cached_property
    def _cached(self) -> list[PlanRow]:
        """The rows of the layers in decoder blocks whose outputs are quantized for the KV cache."""
        matches = [r for r in self._in_blocks if first_match(r.name, self.config.kv_cache_quant_config) is not None]
        parents = _outermost(_parent(r.name) for r in matches)
        return [r for r in matches if _parent(r.name) in parents]

    @cached_property
    def _neither_keys_nor_values(self) -> list[str]:
        """The names of layers in `_cached` whose output is neither keys, nor values, nor both.

        An example is ``kv_b_proj`` of latent attention. The list is empty if the names of projections are
        unknown.
        """
        facts = self.architecture
        if facts is None or facts.key_projections is None or facts.value_projections is None:
            return []
        alone = (*facts.key_projections, *facts.value_projections)
        return [r.name for r in self._cached if not _is_one_of(r.name, alone) and not _is_fused(r.name, facts)]

    @cached_property
    def _key_norm(self) -> str | None:
        """The full name of the first norm that is applied to keys before they are cached, or None."""
        parents = dict.fromkeys(_parent(r.name) for r in self._cached)
        children = (f"{parent}.{name}" for parent in parents for name, _ in self.model.get_submodule(parent).named_children())
        return next((child for child in children if _is_one_of(child, self._facts.key_norms or ())), None)

    @cached_property
    def _why_before_rope(self) -> str | None:
        """The reason why keys or values cannot be rounded inside attention, with a fix. None if they can."""
        after_rope = self._with(True, False)
        reason = next(after_rope._cache_errors(), None)
        return reason or why_unswitchable(self.model, [a.name for a in after_rope.rows if a.states])

    def _cache_errors(self) -> Iterator[str]:
        """Yield an error message for each reason why the cache cannot be rounded inside attention."""
        covered = {layer for row in self.rows for layer, _ in row.states.values()}
        missing = [r.name for r in self._cached if r.name not in covered]
        if others := self._neither_keys_nor_values:
            yield _not_what_is_cached(others)
        elif missing:
            yield (
                f"keys cannot be quantized after the rotary embedding (kv_cache_post_rope): '{missing[0]}' feeds the cache, but its output "
                "is neither keys alone, nor values alone, nor both with queries of one attention module. Leave kv_cache_post_rope out, or "
                "set it to False"
            )
        cached = [(row, spec) for row in self.rows for state, (_, spec) in row.states.items() if state in (KEY, VALUE)]
        reasons = ((row.name, why_not_cached(spec, row.heads)) for row, spec in cached)
        if (reason := next((f"{reason} ('{name}')" for name, reason in reasons if reason is not None), None)) is not None:
            yield f"output_tensors of keys and values with kv_cache_post_rope {reason}. Use a scheme such as fp8"

    def _heads(self, attention: str, key_layer: str | None) -> tuple[int, int] | None:
        """Return `AttentionRow.heads` of the module ``attention``.

        ``key_layer`` is the layer that computes only the keys. It is None if there is no such layer.
        """
        shapes = {row.name: row.shapes for row in self.layers if row.name == key_layer}
        width = shapes[key_layer].of_slot(Slot.output_tensors)[-1] if key_layer in shapes else None
        return key_value_heads(self.model.get_submodule(attention), width)

    def _outputs_without_heads(self, requested_post_rope: bool | None) -> list[str]:
        """Return the names of layers in `_cached` with several scales, which are possible only inside
        attention.

        If the user has set ``kv_cache_post_rope`` to False, dynamic scales are allowed, like in AMD Quark.
        """
        specs = {r.name: r.config.output_tensors for r in self._cached if r.config is not None and r.config.output_tensors is not None}
        is_requested = requested_post_rope is False
        return [
            name
            for name, spec in specs.items()
            if not is_per_tensor(spec) and not (is_requested and all(level.is_dynamic or not is_per_head(level) for level in levels(spec)))
        ]

    def _have_tensor_scales(self, *states: str) -> bool:
        """Return whether the tensors ``states`` (names in ``STATES``) have one scale in each attention."""
        return all(is_per_tensor(spec) for row in self.rows for state, (_, spec) in row.states.items() if state in states)


def _parent(name: str) -> str:
    """Return the full name of the parent module of ``name``."""
    return name.rpartition(".")[0]


def _wants_tensor_scale(subject: str) -> str:
    return (
        f"{subject} must have one scale per tensor (qscheme per_tensor), because tensors inside attention have other axes than the output "
        "of a layer. Use a scheme such as fp8"
    )


def _not_what_is_cached(layers: Sequence[str]) -> str:
    return (
        f"The output of {folded(layers)} is neither keys, nor values, nor both with queries, so runtimes do not cache it. In latent "
        "attention (MLA), they cache the normed latent and the rotated part of the keys, and vLLM does not load a scale of this output. "
        "Leave kv_cache_scheme out and start vLLM with --kv-cache-dtype fp8, or set kv_cache_post_rope=False to round these outputs as "
        "AMD Quark does"
    )


def _outermost(names: Iterable[str]) -> list[str]:
    """Return the names of modules that are not inside another module in ``names``.

    This removes, for instance, a token indexer inside attention, which has projections but no cache.
    """
    unique = dict.fromkeys(names)
    return [n for n in unique if not any(".".join(n.split(".")[:i]) in unique for i in range(1, n.count(".") + 1))]


def _projection(attention: str, projections: Iterable[str], among: Iterable[PlanRow]) -> PlanRow | None:
    """Return the first of the rows ``among`` that is a projection of the module ``attention``, or None.

    The names in ``projections`` are relative to a decoder block.
    """
    inside = (row for row in among if _parent(row.name) == attention)
    return next((row for row in inside if _is_one_of(row.name, projections)), None)


def _is_fused(name: str, facts: Architecture) -> bool:
    """Return whether the output of the layer ``name`` contains queries, keys and values together."""
    alone = (*(facts.query_projections or ()), *(facts.key_projections or ()), *(facts.value_projections or ()))
    return gives_queries_keys_and_values(name, facts) and not _is_one_of(name, alone)


def _is_one_of(name: str, names_in_block: Iterable[str]) -> bool:
    """Return whether ``name`` equals one of ``names_in_block``, or ends with a dot and one of them."""
    return any(name == one or name.endswith(f".{one}") for one in names_in_block)
