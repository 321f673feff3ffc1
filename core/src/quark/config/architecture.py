"""Architecture: the facts about a model family, each stated once, as data; no code and no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import attrs

from quark.base.lazy import LazyRef, as_optional_reference

__all__ = ["FUSED_EXPERTS", "Architecture", "Rows", "WeightConversion"]

WeightConversion = tuple[str, tuple[str, ...], tuple[tuple[str | int, ...], ...]]
"""A weight converter as data: the suffix of a stored name, the suffixes of the new names, and operations.

Operations are names in ``transformers.core_model_loading`` or `quark.models.hf.weight_converters`, each with
its arguments. A star in a name stands for the number of an expert.

Example: ``("gate_up_proj", ("gate_proj.weight", "up_proj.weight"), (("SplitFusedExperts", 0),))``.
"""

FUSED_EXPERTS: tuple[WeightConversion, ...] = (
    ("gate_up_proj", ("gate_proj.weight", "up_proj.weight"), (("SplitFusedExperts", 0),)),
    ("down_proj", ("down_proj.weight",), (("SplitFusedExperts", 0),)),
)
"""The common layout of fused experts.

``gate_up_proj`` is ``[E, 2 I, H]``, gate first, and ``down_proj`` ``[E, H, I]``, for E experts, hidden size H
and intermediate size I.
"""

Rows = Literal["all", "last", "last_of_each_head"]
"""Rows of a weight ``[out_features, in_features]``: all rows, the last rows, or the last rows of each
attention head.
"""


def _tuple(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


@attrs.frozen(kw_only=True)
class Architecture:
    """The structure of a model family: names of modules, and the modules that read their outputs.

    Names have three scopes: *full names* are relative to the model; names *in a block* are relative to one
    decoder block; names *in an expert* are relative to one expert, after experts are separated. *Patterns*
    are shell patterns (``fnmatch``) for full names of layers. A name in a block applies to the blocks that
    have such a module, so a family may state both a dense MLP and a mixture.

    Attributes:
        model_type: ``config.model_type`` of the family, such as ``"llama"``.
        decoder_blocks: Full name of the list of decoder blocks, such as ``"model.layers"``, or of the blocks
            of a model without a decoder. If None and without encoder blocks, the whole model is one block.
        encoder_blocks: Full names of the lists of blocks that a forward passes before ``decoder_blocks``, in
            order, such as ``"model.encoder.layers"``. Names in a block apply to them too.
        embeddings: Full names of the token embeddings, such as ``"model.embed_tokens"``.
        final_norm: Full name of the norm before the head, such as ``"model.norm"``.
        head: Full name of the output projection, such as ``"lm_head"``.
        attention_inputs: In a block: the input group of attention, the projections that read its normed
            input, such as ``("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")``.
        attention_output: In a block: the last projection of attention, such as ``"self_attn.o_proj"``.
        attention_inner: In a block: projections between ``attention_inputs`` and ``attention_output``, such
            as the second factors of low-rank attention, ``("self_attn.q_b_proj", "self_attn.kv_b_proj")``; or
            projections between attention and the MLP, such as a decoder's attention to its encoder.
        query_projections: In a block: projections whose output has queries, but no keys or values, such as
            ``"self_attn.q_proj"``; one for each attention of a block. ``()`` if queries come from a fused
            matrix. None: inferred from names (`quark.models.plan.inferred_architecture`).
        key_projections: The same for keys, such as ``"self_attn.k_proj"``.
        value_projections: The same for values, such as ``"self_attn.v_proj"``.
        key_norms: In a block: norms that keys pass between their projection and the cache, such as
            ``"self_attn.k_norm"``. None: inferred.
        attention_norm: In a block: the norm that feeds ``attention_inputs``, such as ``"input_layernorm"``.
        attention_inner_norms: In a block: norms inside attention, each with the projections that read it,
            such as ``(("self_attn.kv_a_layernorm", ("self_attn.kv_b_proj",)),)``. Norms of single heads, such
            as ``k_norm``, are not listed.
        attention_value: In a block: the projection whose output reaches ``attention_output`` linearly (KV
            heads repeated), multiplied only by factors that do not depend on it, such as
            ``"self_attn.v_proj"``. Scale may be moved from it to ``attention_output``. None: there is no such
            projection.
        attention_value_rows: Rows of ``attention_value`` that are values, such as ``"last"`` in a fused QKV
            matrix.
        attention_output_norm: In a block: the norm on the output of ``attention_output``, before the residual
            addition, such as ``"post_attention_layernorm"`` in Gemma 2.
        mixer: In blocks without attention: projections of the mixer that replaces it, such as
            ``("mamba.in_proj", "mamba.out_proj")``. The last is the output projection; the others read the
            output of ``attention_norm``.
        mixer_context: Projections of ``mixer`` that read another input, such as ``"cross_attn.k_proj"``,
            which reads the vision states.
        mlp_inputs: In a block: the input group of the dense MLP, such as
            ``("mlp.gate_proj", "mlp.up_proj")``.
        mlp_output: In a block: the last projection of the MLP, such as ``"mlp.down_proj"``.
        mlp_norm: In a block: the norm that feeds ``mlp_inputs``, or router and experts, such as
            ``"post_attention_layernorm"``.
        mlp_value: In a block: the projection whose output reaches ``mlp_output`` multiplied only by factors
            that do not depend on it, or through a ReLU, which commutes with positive factors, such as
            ``"mlp.up_proj"``. None: there is no such projection.
        mlp_value_rows: Rows of ``mlp_value`` that are multiplied by the activated gate, such as ``"last"`` in
            a fused gate/up matrix.
        mlp_output_norm: In a block: the norm on the output of the MLP or mixture, such as
            ``"post_feedforward_layernorm"`` in Gemma 2.
        experts: In a block: the module that holds all experts, such as ``"mlp.experts"``; expert 3 is
            ``"mlp.experts.3"``.
        experts_norm: In a block: the norm that feeds only the experts, if they run beside a dense MLP with
            its own norm and the router reads the residual stream directly, such as
            ``"pre_feedforward_layernorm_2"`` in Gemma 4.
        expert_parts: ``"module:function"`` that separates fused experts, if their class does not describe
            them by the experts interface of transformers. The function gets a module and the names of an
            expert's projections, the last of them ``expert_output``. It returns a
            `quark.models.layers.experts.ExpertParts`, or None for any other module.
        router: In a block: the layer that chooses experts, such as ``"mlp.gate"``; it stays float.
        expert_inputs: In an expert: the input group, such as ``("gate_proj", "up_proj")``.
        expert_output: In an expert: the last projection, such as ``"down_proj"``.
        expert_value: In an expert: as ``mlp_value``, such as ``"up_proj"``.
        shared_experts: In a block: projections of the experts that every token passes, such as
            ``("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj")``.
            The last is their output; the others read the normed input.
        shared_expert_value: As ``mlp_value`` for the shared experts, such as ``"mlp.shared_expert.up_proj"``.
        shared_expert_value_rows: As ``mlp_value_rows`` for the shared experts.
        shared_expert_gate: In a block: the layer whose output weights the shared experts, such as
            ``"mlp.shared_expert_gate"``.
        norm_has_unit_offset: Whether norms multiply by ``1 + weight``, as in Gemma.
        norm_has_weight: Whether norms of blocks and the final norm have a weight. Norms without one, as in
            OLMo 1, cannot absorb a scale.
        norm_subtracts_mean: Whether norms of blocks and the final norm subtract the mean (LayerNorm), or not
            (RMSNorm).
        embedding_norm: Full name of a norm on the embeddings, such as
            ``"transformer.word_embeddings_layernorm"``.
        position_embeddings: Full name of learned positions that are added to the embeddings, such as
            ``"transformer.wpe"``.
        inserted_embeddings: Full names, or patterns, of projections whose outputs replace token embeddings or
            are added to the residual stream, such as the last layer of a vision tower's projector,
            ``"model.visual.merger.linear_fc2"``.
        kv_layers_name: AMD Quark's patterns of the projections whose outputs enter the KV cache, such as
            ``("*k_proj", "*v_proj")``.
        q_layer_name: AMD Quark's pattern, or patterns, of the query projections, such as ``"*q_proj"``.
        gate_up_layers_name: Suffixes of the two input projections of the MLP, such as
            ``("gate_proj", "up_proj")``.
        exclude_layers_name: AMD Quark's patterns of layers that stay float, such as ``"lm_head"``.
        module_patterns: Pairs of patterns for the same layers: AMD Quark's pattern, with the names in
            published checkpoints, and the pattern with transformers' module names, such as
            ``("*wkv", "*self_attn.kv_proj")``. Configurations list both.
        fused: Suffixes that runtimes such as vLLM fuse into one matrix, and which therefore need the same
            format, such as ``(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))``.
        weight_converters: How stored tensors become the tensors of single layers (`WeightConversion`), if AMD
            Quark's template has converters or the layout is not `FUSED_EXPERTS`.
        algorithm_defaults: Settings by algorithm name that replace the algorithm's defaults, as in AMD
            Quark's templates, such as ``{"smoothquant": {"alpha": 0.8}}``.
        unsupported: Reasons why algorithms cannot be applied to this family, if no other fact shows it. Keys
            are names of algorithms, with a part of the algorithm after a dot:
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
        """Full names of all lists of blocks, in the order of a forward."""
        return (*self.encoder_blocks, *((self.decoder_blocks,) if self.decoder_blocks is not None else ()))

    def with_modules(self, patterns: Iterable[str]) -> list[str]:
        """Return ``patterns``, each followed by its module pattern from `module_patterns`.

        >>> facts = Architecture(model_type="deepseek_v4", module_patterns=(("*wkv", "*self_attn.kv_proj"),))
        >>> facts.with_modules(["*wkv", "head"])
        ['*wkv', '*self_attn.kv_proj', 'head']
        """
        pairs = self.module_patterns
        return [name for pattern in patterns for name in (pattern, *(module for stored, module in pairs if stored == pattern))]
