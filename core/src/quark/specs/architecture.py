"""Architecture: the facts about a model family, stated once, as data. Names are relative patterns, never code."""

from __future__ import annotations

from typing import Any

import attrs

WeightConversion = tuple[str, tuple[str, ...], tuple[tuple[str | int, ...], ...]]
"""What a stored tensor becomes: the end of its name, the ends of the others' names, and steps of `quark.model.conversion_ops` by name, each
with its arguments. A star in a name stands for the number of an expert."""

FUSED_EXPERTS: tuple[WeightConversion, ...] = (
    ("gate_up_proj", ("gate_proj.weight", "up_proj.weight"), (("SplitFusedExperts", 0),)),
    ("down_proj", ("down_proj.weight",), (("SplitFusedExperts", 0),)),
)
"""The common layout of fused experts: ``gate_up_proj`` ``[E, 2 I, H]``, gate first, and ``down_proj`` ``[E, H, I]``."""


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
        mixer: In blocks that have no attention: projections of what stands in its place, such as a state-space model.
        mlp_inputs: In a block: projections that read the normed MLP input.
        mlp_output: In a block: the projection that closes the MLP.
        mlp_norm: In a block: the norm that feeds ``mlp_inputs``.
        experts: In a block: the experts of a mixture, all of them.
        router: In a block: what chooses among the experts; it stays float.
        shared_experts: In a block: projections of experts that every token passes.
        norm_has_unit_offset: Norms multiply by ``1 + weight``.
        kv_layers_name: Documented patterns of the projections whose outputs enter the cache.
        q_layer_name: Documented patterns of the query projections.
        gate_up_layers_name: Suffixes of the two MLP input projections.
        exclude_layers_name: Documented patterns left in float.
        fused: Suffixes that runtimes fuse into one matrix, and so must agree in format: ``(("q_proj", "k_proj", "v_proj"), …)``.
        weight_converters: How stored tensors become those of single layers, where it is not `FUSED_EXPERTS` or templates document it.
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
    mixer: tuple[str, ...] = attrs.field(default=(), converter=_tuple)
    mlp_inputs: tuple[str, ...] = attrs.field(default=(), converter=_tuple)
    mlp_output: str | None = None
    mlp_norm: str | None = None
    experts: str | None = None
    router: str | None = None
    shared_experts: tuple[str, ...] = attrs.field(default=(), converter=_tuple)
    norm_has_unit_offset: bool = False
    kv_layers_name: tuple[str, ...] | None = attrs.field(default=None, converter=attrs.converters.optional(_tuple))
    q_layer_name: str | tuple[str, ...] | None = None
    gate_up_layers_name: tuple[str, ...] = attrs.field(default=("gate_proj", "up_proj"), converter=_tuple)
    exclude_layers_name: tuple[str, ...] = attrs.field(default=(), converter=_tuple)
    fused: tuple[tuple[str, ...], ...] = ()
    weight_converters: tuple[WeightConversion, ...] = ()
