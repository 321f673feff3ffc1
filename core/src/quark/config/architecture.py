"""`Architecture` states the facts about a model family as data. This module imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import attrs

from quark.base.lazy import LazyRef, as_optional_reference

__all__ = ["FUSED_EXPERTS", "Architecture", "Rows", "WeightConversion"]

WeightConversion = tuple[str, tuple[str, ...], tuple[tuple[str | int, ...], ...]]
"""A weight converter as data: the suffix of a stored name, the suffixes of the new names, and operations.

An operation is a tuple of a name and arguments. The name is a class in ``transformers.core_model_loading`` or
`quark.models.hf.weight_converters`. A star in the name of a tensor stands for the number of an expert.

Example: ``("gate_up_proj", ("gate_proj.weight", "up_proj.weight"), (("SplitFusedExperts", 0),))``.
"""

FUSED_EXPERTS: tuple[WeightConversion, ...] = (
    ("gate_up_proj", ("gate_proj.weight", "up_proj.weight"), (("SplitFusedExperts", 0),)),
    ("down_proj", ("down_proj.weight",), (("SplitFusedExperts", 0),)),
)
"""The weight converters for the common layout of fused experts.

E is the number of experts, H the hidden size and I the intermediate size. ``gate_up_proj`` has the shape
``[E, 2 I, H]``, with the rows of the gate first. ``down_proj`` has the shape ``[E, H, I]``.
"""

Rows = Literal["all", "last", "last_of_each_head"]
"""Rows of a weight ``[out_features, in_features]``: all rows, the last rows, or the last rows of each
attention head.
"""


def _tuple(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


@attrs.frozen(kw_only=True)
class Architecture:
    """The structure of a model family: the names of modules, and which of them read the output of others.

    Names have three scopes. *Full names* are relative to the model. Names *in a block* are relative to one
    decoder block. Names *in an expert* are relative to one expert, after fused experts are separated.
    *Patterns* are shell patterns (``fnmatch``) for full names of layers. A name in a block applies only to
    the blocks that have such a module. So an `Architecture` may name both a dense MLP and a mixture of
    experts.

    Attributes:
        model_type: ``config.model_type`` of the family, such as ``"llama"``.
        decoder_blocks: Full name of the list of decoder blocks, such as ``"model.layers"``. For a model
            without a decoder, full name of the list of its blocks. If this is None and ``encoder_blocks`` is
            empty, the whole model is one block.
        encoder_blocks: Full names of the lists of blocks that run before ``decoder_blocks``, in order, such
            as ``"model.encoder.layers"``. Names in a block apply to these blocks too.
        embeddings: Full names of the token embeddings, such as ``"model.embed_tokens"``.
        final_norm: Full name of the norm before the head, such as ``"model.norm"``.
        head: Full name of the output projection, such as ``"lm_head"``.
        attention_inputs: In a block: the projections that read the output of ``attention_norm``, such as
            ``("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")``. They are the input group of
            attention.
        attention_output: In a block: the last projection of attention, such as ``"self_attn.o_proj"``.
        attention_inner: In a block: projections between ``attention_inputs`` and ``attention_output``, such
            as the second factors of low-rank attention, ``("self_attn.q_b_proj", "self_attn.kv_b_proj")``.
            Projections between attention and the MLP also belong here, such as the projections of a decoder's
            cross-attention.
        query_projections: In a block: projections whose outputs contain queries, but no keys or values, such
            as ``"self_attn.q_proj"``, one for each attention layer of the block. An empty tuple if a fused
            matrix computes the queries. If None, quark infers them from names
            (`quark.models.plan.inferred_architecture`).
        key_projections: Like ``query_projections``, but for keys, such as ``"self_attn.k_proj"``.
        value_projections: Like ``query_projections``, but for values, such as ``"self_attn.v_proj"``.
        key_norms: In a block: norms on the keys between their projection and the KV cache, such as
            ``"self_attn.k_norm"``. If None, quark infers them from names.
        attention_norm: In a block: the norm whose output is the input of ``attention_inputs``, such as
            ``"input_layernorm"``.
        attention_inner_norms: In a block: pairs of a norm inside attention and the projections that read the
            norm's output, such as ``(("self_attn.kv_a_layernorm", ("self_attn.kv_b_proj",)),)``. Norms of
            single heads, such as ``k_norm``, do not belong here.
        attention_value: In a block: the projection that computes the values, such as ``"self_attn.v_proj"``.
            The input of ``attention_output`` must be a linear function of the output of this projection, so
            that an equalization can move scales from this projection to ``attention_output``. KV heads may be
            repeated. None if there is no such projection.
        attention_value_rows: Rows of ``attention_value`` that compute values, such as ``"last"`` in a fused
            QKV matrix.
        attention_output_norm: In a block: the norm on the output of ``attention_output``, before the residual
            addition, such as ``"post_attention_layernorm"`` in Gemma 2.
        mixer: In blocks without attention: projections of the mixer that replaces attention, such as
            ``("mamba.in_proj", "mamba.out_proj")``. The last projection is the output projection. The other
            projections read the output of ``attention_norm``.
        mixer_context: Projections of ``mixer`` that read another input, such as ``"cross_attn.k_proj"``,
            which reads the vision states.
        mlp_inputs: In a block: the projections that read the input of the dense MLP (its input group), such
            as ``("mlp.gate_proj", "mlp.up_proj")``.
        mlp_output: In a block: the last projection of the MLP, such as ``"mlp.down_proj"``.
        mlp_norm: In a block: the norm whose output is the input of ``mlp_inputs``, or of the router and the
            experts, such as ``"post_attention_layernorm"``.
        mlp_value: In a block: the projection from which an equalization can move scales to ``mlp_output``,
            such as ``"mlp.up_proj"``. Between the two projections, there may be only a ReLU, or a
            multiplication by factors that do not depend on the output of ``mlp_value``. None if there is no
            such projection.
        mlp_value_rows: Rows of ``mlp_value`` that are multiplied by the activated gate, such as ``"last"`` in
            a fused gate/up matrix.
        mlp_output_norm: In a block: the norm on the output of the MLP or of the mixture of experts, such as
            ``"post_feedforward_layernorm"`` in Gemma 2.
        experts: In a block: the module that contains all experts, such as ``"mlp.experts"``. The name of
            expert 3 is then ``"mlp.experts.3"``.
        experts_norm: In a block: a norm whose output only the experts read, such as
            ``"pre_feedforward_layernorm_2"`` in Gemma 4. There, a dense MLP with its own norm runs in
            parallel to the experts, and the router reads the residual stream directly.
        expert_parts: Reference ``"module:function"`` to a function that separates fused experts. It is needed
            if the class of the experts does not support the experts interface of transformers. The function
            gets a module and the names of an expert's projections. The last name is ``expert_output``. The
            function returns a `quark.models.layers.experts.ExpertParts`, or None if the class of the module
            is not a class of experts that it can separate.
        router: In a block: the layer that chooses experts, such as ``"mlp.gate"``. It stays float.
        expert_inputs: In an expert: the projections that read the expert's input, such as
            ``("gate_proj", "up_proj")``.
        expert_output: In an expert: the last projection, such as ``"down_proj"``.
        expert_value: In an expert: the counterpart of ``mlp_value``, such as ``"up_proj"``.
        shared_experts: In a block: projections of the experts that process every token, such as
            ``("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj")``.
            The last projection is the output projection. The other projections read the output of
            ``mlp_norm``.
        shared_expert_value: In a block: the counterpart of ``mlp_value`` in the shared experts, such as
            ``"mlp.shared_expert.up_proj"``.
        shared_expert_value_rows: The counterpart of ``mlp_value_rows`` for ``shared_expert_value``.
        shared_expert_gate: In a block: the layer whose output is the weight of the shared experts, such as
            ``"mlp.shared_expert_gate"``.
        norm_has_unit_offset: Whether norms multiply by ``1 + weight``, as in Gemma.
        norm_has_weight: Whether the norms of blocks and the final norm have a weight. Norms without a weight,
            as in OLMo 1, cannot absorb a scale.
        norm_subtracts_mean: Whether the norms of blocks and the final norm subtract the mean, as LayerNorm
            does. RMSNorm does not.
        embedding_norm: Full name of a norm on the embeddings, such as
            ``"transformer.word_embeddings_layernorm"``.
        position_embeddings: Full name of the learned position embeddings that are added to the token
            embeddings, such as ``"transformer.wpe"``.
        inserted_embeddings: Full names, or patterns, of projections whose outputs replace token embeddings or
            are added to the residual stream. An example is ``"model.visual.merger.linear_fc2"``, the last
            layer of a vision tower's projector.
        kv_layers_name: AMD Quark's patterns of the projections whose outputs enter the KV cache, such as
            ``("*k_proj", "*v_proj")``.
        q_layer_name: AMD Quark's pattern, or patterns, of the query projections, such as ``"*q_proj"``.
        gate_up_layers_name: Suffixes of the two input projections of the MLP, such as
            ``("gate_proj", "up_proj")``.
        exclude_layers_name: AMD Quark's patterns of layers that stay float, such as ``"lm_head"``.
        module_patterns: Pairs of patterns for the same layers, such as ``("*wkv", "*self_attn.kv_proj")``.
            The first pattern is AMD Quark's pattern for the names in published checkpoints. The second
            pattern is for the module names in transformers. If a configuration lists the first pattern,
            quark adds the second one.
        fused: Groups of suffixes of layers that runtimes such as vLLM fuse into one matrix, such as
            ``(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))``. The layers of a group need the
            same format.
        weight_converters: Conversions of stored tensors to the tensors of single layers
            (`WeightConversion`). They are needed if AMD Quark's template has converters, or if the layout is
            not `FUSED_EXPERTS`.
        algorithm_defaults: Mapping from the name of an algorithm to settings that replace the algorithm's
            defaults, as in AMD Quark's templates, such as ``{"smoothquant": {"alpha": 0.8}}``.
        unsupported: Mapping from an algorithm to the reason why it cannot be applied to this family. The
            mapping contains only reasons that do not follow from the other attributes. A key is the name of
            an algorithm, or its name and a part of the algorithm after a dot, such as
            ``{"rotation.r1": "its residual stream is several streams"}``.
    """

    model_type: str
    decoder_blocks: str | None = None
    encoder_blocks: tuple[str, ...] = attrs.field(default=(), converter=_tuple)
    embeddings: tuple[str, ...] = attrs.field(default=(), converter=_tuple)
    final_norm: str | None = None
    head: str | None = None
    attention_inputs: tuple[str, ...] = attrs.field(default=(), converter=_tuple)
    attention_output: str | None = None
    attention_inner: tuple[str, ...] = attrs.field(default=(), converter=_tuple)
    query_projections: tuple[str, ...] | None = attrs.field(default=None, converter=attrs.converters.optional(_tuple))
    key_projections: tuple[str, ...] | None = attrs.field(default=None, converter=attrs.converters.optional(_tuple))
    value_projections: tuple[str, ...] | None = attrs.field(default=None, converter=attrs.converters.optional(_tuple))
    key_norms: tuple[str, ...] | None = attrs.field(default=None, converter=attrs.converters.optional(_tuple))
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
    experts_norm: str | None = None
    expert_parts: LazyRef | None = attrs.field(default=None, converter=as_optional_reference)
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

    @property
    def block_lists(self) -> tuple[str, ...]:
        """Full names of all lists of blocks, in the order of a forward pass."""
        return (*self.encoder_blocks, *((self.decoder_blocks,) if self.decoder_blocks is not None else ()))

    def with_modules(self, patterns: Iterable[str]) -> list[str]:
        """Return ``patterns``. A pattern that has a counterpart in ``module_patterns`` is followed by it.

        >>> facts = Architecture(model_type="deepseek_v4", module_patterns=(("*wkv", "*self_attn.kv_proj"),))
        >>> facts.with_modules(["*wkv", "head"])
        ['*wkv', '*self_attn.kv_proj', 'head']
        """
        pairs = self.module_patterns
        return [name for pattern in patterns for name in (pattern, *(module for stored, module in pairs if stored == pattern))]
