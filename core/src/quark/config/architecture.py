"""Architecture: the facts about a model family, stated once, as data. Names are relative patterns, never code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import attrs

WeightConversion = tuple[str, tuple[str, ...], tuple[tuple[str | int, ...], ...]]
"""What a stored tensor becomes: the end of its name, the ends of the others' names, and steps of `quark.hf.conversion_ops` by name, each
with its arguments. A star in a name stands for the number of an expert."""

FUSED_EXPERTS: tuple[WeightConversion, ...] = (
    ("gate_up_proj", ("gate_proj.weight", "up_proj.weight"), (("SplitFusedExperts", 0),)),
    ("down_proj", ("down_proj.weight",), (("SplitFusedExperts", 0),)),
)
"""The common layout of fused experts: ``gate_up_proj`` ``[E, 2 I, H]``, gate first, and ``down_proj`` ``[E, H, I]``."""

Rows = Literal["all", "last", "last_of_each_head"]
"""Which rows of a matrix are meant: all, the last ones as one run, or the last ones of what each head has in it."""

ExpertForm = Literal["interface", "sorted", "stacked"]
"""How a model holds the experts of a mixture, and calls them: as its class says by the experts interface of transformers; or

- ``sorted``: ``gate_up_proj`` ``[E, H, 2 I]``, gate first, and ``down_proj`` ``[E, I, H]``, called with every token once for each expert,
  ``[E · tokens, H]``, weighted already, and zero where it is not routed;
- ``stacked``: a parameter ``[E · I, H]`` for each projection, called with tokens, choices and weights, as by the interface.

Between the projections of an expert, the activated gate is multiplied to the other, by the module's own activation."""


def _tuple(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


@attrs.frozen(kw_only=True)
class Architecture:
    """Where things are in a model family.

    Full names are relative to the model; names under "in a block" are relative to one decoder block.

    Attributes:
        model_type: ``config.model_type`` of the family.
        decoder_blocks: Full name of the list of decoder blocks, such as ``"model.layers"``.
        embeddings: Full names of the token embeddings.
        final_norm: Full name of the norm before the head.
        head: Full name of the output projection.
        attention_inputs: In a block: projections that read the normed attention input (q, k, v, or fused).
        attention_output: In a block: the projection that closes attention.
        attention_inner: In a block: projections between those inputs and that output, such as the second factors of low-rank ones.
        attention_norm: In a block: the norm that feeds ``attention_inputs``.
        attention_inner_norms: In a block: norms inside attention, each with the projections that read it, such as those between the two
            factors of a low-rank projection. Norms on single heads are not among them.
        attention_value: In a block: the projection whose output reaches ``attention_output`` linearly, key-value heads repeated; whatever
            is multiplied to it on the way does not depend on it. None where there is none.
        attention_value_rows: Which of its rows are the values.
        attention_output_norm: In a block: the norm on what ``attention_output`` puts out, before that is added to the residual stream.
        mixer: In blocks that have no attention: projections of what stands in its place, such as a state-space model; the last closes it,
            the others read the output of ``attention_norm``.
        mixer_context: Those of ``mixer`` that read something else, such as what a vision tower has seen.
        mlp_inputs: In a block: projections that read the normed MLP input.
        mlp_output: In a block: the projection that closes the MLP.
        mlp_norm: In a block: the norm that feeds ``mlp_inputs``, and router and experts of a mixture.
        mlp_value: In a block: the projection whose output reaches ``mlp_output`` only multiplied by what does not depend on it, or through
            a ReLU alone, so that positive factors pass. None where there is none.
        mlp_value_rows: Which of its rows do.
        mlp_output_norm: As ``attention_output_norm``, of the MLP or the mixture.
        experts: In a block: the experts of a mixture, all of them.
        expert_form: How they are held fused, where their class does not say it.
        router: In a block: what chooses among the experts; it stays float.
        expert_inputs: In one expert: projections that read the normed input, once experts are separate layers.
        expert_output: In one expert: the projection that closes it.
        expert_value: In one expert: what ``mlp_value`` is in a block.
        shared_experts: In a block: projections of experts that every token passes; the last closes them, the others read the normed input.
        shared_expert_value: What ``mlp_value`` is for them.
        shared_expert_value_rows: Which of its rows do.
        shared_expert_gate: In a block: what weighs their output by the normed input.
        norm_has_unit_offset: Norms multiply by ``1 + weight``.
        norm_has_weight: The norms of blocks and the final one have parameters; without, no scale can be folded into them.
        norm_subtracts_mean: Norms of blocks and the final one subtract the mean, as LayerNorm does; without, they are RMSNorms.
        embedding_norm: Full name of a norm on the embeddings, before the first block.
        position_embeddings: Full name of learned positions that are added to the embeddings.
        inserted_embeddings: Full names, or patterns, of projections whose outputs stand in for token embeddings or are added to the
            residual stream, such as those that close a vision tower.
        kv_layers_name: Documented patterns of the projections whose outputs enter the cache.
        q_layer_name: Documented patterns of the query projections.
        gate_up_layers_name: Suffixes of the two MLP input projections.
        exclude_layers_name: Documented patterns left in float.
        module_patterns: Documented patterns that name layers as published checkpoints do, each with one that names them as the modules of
            transformers are called. Configurations have both.
        fused: Suffixes that runtimes fuse into one matrix, and so must agree in format: ``(("q_proj", "k_proj", "v_proj"), …)``.
        weight_converters: How stored tensors become those of single layers, where it is not `FUSED_EXPERTS` or templates document it.
        algorithm_defaults: By name of an algorithm, the values that templates document in place of its own defaults.
        unsupported: By name of an algorithm, why this family cannot take it, where that does not follow from the other facts.
    """

    model_type: str
    decoder_blocks: str | None = None
    embeddings: tuple[str, ...] = attrs.field(default=(), converter=_tuple)
    final_norm: str | None = None
    head: str | None = None
    attention_inputs: tuple[str, ...] = attrs.field(default=(), converter=_tuple)
    attention_output: str | None = None
    attention_inner: tuple[str, ...] = attrs.field(default=(), converter=_tuple)
    attention_norm: str | None = None
    attention_inner_norms: tuple[tuple[str, tuple[str, ...]], ...] = ()
    attention_value: str | None = None
    attention_value_rows: Rows = "all"
    attention_output_norm: str | None = None
    mixer: tuple[str, ...] = attrs.field(default=(), converter=_tuple)
    mixer_context: tuple[str, ...] = attrs.field(default=(), converter=_tuple)
    mlp_inputs: tuple[str, ...] = attrs.field(default=(), converter=_tuple)
    mlp_output: str | None = None
    mlp_norm: str | None = None
    mlp_value: str | None = None
    mlp_value_rows: Rows = "all"
    mlp_output_norm: str | None = None
    experts: str | None = None
    expert_form: ExpertForm = "interface"
    router: str | None = None
    expert_inputs: tuple[str, ...] = attrs.field(default=("gate_proj", "up_proj"), converter=_tuple)
    expert_output: str = "down_proj"
    expert_value: str | None = "up_proj"
    shared_experts: tuple[str, ...] = attrs.field(default=(), converter=_tuple)
    shared_expert_value: str | None = None
    shared_expert_value_rows: Rows = "all"
    shared_expert_gate: str | None = None
    norm_has_unit_offset: bool = False
    norm_has_weight: bool = True
    norm_subtracts_mean: bool = False
    embedding_norm: str | None = None
    position_embeddings: str | None = None
    inserted_embeddings: tuple[str, ...] = attrs.field(default=(), converter=_tuple)
    kv_layers_name: tuple[str, ...] | None = attrs.field(default=None, converter=attrs.converters.optional(_tuple))
    q_layer_name: str | tuple[str, ...] | None = None
    gate_up_layers_name: tuple[str, ...] = attrs.field(default=("gate_proj", "up_proj"), converter=_tuple)
    exclude_layers_name: tuple[str, ...] = attrs.field(default=(), converter=_tuple)
    module_patterns: tuple[tuple[str, str], ...] = ()
    fused: tuple[tuple[str, ...], ...] = ()
    weight_converters: tuple[WeightConversion, ...] = ()
    algorithm_defaults: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict, hash=False)
    unsupported: Mapping[str, str] = attrs.field(factory=dict, hash=False)

    def with_modules(self, patterns: Iterable[str]) -> list[str]:
        """Documented patterns, each followed by those for the same layers in `module_patterns`."""
        return [name for pattern in patterns for name in (pattern, *(own for one, own in self.module_patterns if one == pattern))]
