"""Mappings of a decoder block for equalization (SmoothQuant, AWQ), derived from the architecture.

A mapping has a smooth layer and its balance layers. The operations between them act on each channel
separately and linearly, and no other layer reads the output of the smooth layer. So the block's output does
not change if the output channels of the smooth layer are divided by positive scales and the input channels of
the balance layers are multiplied by the same scales.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import attrs

from quark.config.architecture import Architecture, Rows

__all__ = [
    "LayerMapping",
    "MappingKind",
    "enclosing",
    "linear_layers",
    "mappings_of",
    "of_experts",
    "readers_of_attention_norm",
    "readers_of_mlp_norm",
    "writers_before_blocks",
    "writers_of_attention",
    "writers_of_mlp",
]

MappingKind = Literal["norm", "inner_norm", "value", "mlp_value", "by_module"]
"""Kind of the smooth layer. ``by_module`` is for a user mapping that the architecture does not have:
`resolve` then finds the kind from the module.
"""


def _as_tuple(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names as a tuple. Names that come from JSON are a list."""
    return tuple(names)


@attrs.frozen
class LayerMapping:
    """The names of a smooth layer and its balance layers, relative to a decoder block.

    ``*`` in a name stands for the number of an expert. It is the same number in all names.

    A mapping applies to a block if the block has all modules of the mapping. For example, the mappings of
    mixture-of-experts layers and of dense MLPs apply to different blocks. If only names of balance layers
    have a star, every expert reads the output of the smooth layer. In this case, the mapping applies only if
    the experts are separate layers.

    Attributes:
        kind: Kind of the smooth layer: a norm before attention or MLP, a norm inside attention, or a
            projection. With the kind ``value``, the output channels of the smooth layer are the channels of
            the key-value heads, and several query heads may share one key-value head.
        smooth_layer: Name of the smooth layer. Scales divide the weight and bias of a norm, or the output
            rows and bias of a projection.
        balance_layers: Names of all layers that read the output of the smooth layer. Projections come first.
            The layers that are never quantized, such as routers, follow. They must be multiplied by the
            scales, too.
        inspect: Name of the innermost module that contains all balance layers. ``""`` means the block, and
            None means that there is only one balance layer.
        rows: Which output rows of a projection are divided. Their number is the number of input channels of
            the balance layers, or the number of channels of the key-value heads.
    """

    kind: MappingKind
    smooth_layer: str
    balance_layers: tuple[str, ...] = attrs.field(converter=_as_tuple)
    inspect: str | None = None
    rows: Rows = "all"

    def documented(self) -> dict[str, Any]:
        """Return the mapping as an entry of ``scaling_layers`` in AMD Quark's configurations.

        The entry has no key ``rows`` if all rows are divided.
        """
        form: dict[str, Any] = {
            "prev_op": self.smooth_layer,
            "layers": list(self.balance_layers),
            "inp": self.balance_layers[0],
            "module2inspect": self.inspect,
        }
        return form if self.rows == "all" else form | {"rows": self.rows}


def mappings_of(facts: Architecture) -> tuple[LayerMapping, ...]:
    """Return all mappings of an architecture, in the order in which data flows."""
    return (*_before_attention(facts), *_inside_attention(facts), *_before_mlp(facts), *_inside_mlp(facts))


def linear_layers(facts: Architecture) -> tuple[str, ...]:
    """Return the names of all projections of a block, in the order in which data flows.

    In the names of layers in experts, a star stands for the number of the expert.
    """
    named = [
        *facts.attention_inputs,
        *facts.attention_inner,
        facts.attention_output,
        *facts.mixer,
        *facts.mlp_inputs,
        facts.mlp_output,
        *of_experts(facts, facts.expert_inputs),
        *of_experts(facts, (facts.expert_output,)),
        *facts.shared_experts,
    ]
    return tuple(name for name in named if name)


def of_experts(facts: Architecture, names: tuple[str, ...]) -> tuple[str, ...]:
    """Convert names relative to an expert to names relative to a block.

    A star stands for the number of the expert. The result is empty if the architecture has no experts.
    """
    return tuple(f"{facts.experts}.*.{name}" for name in names) if facts.experts else ()


def readers_of_attention_norm(facts: Architecture) -> tuple[tuple[str, ...], ...]:
    """Return groups of layers that read the output of the norm before attention. The groups do not include
    layers of MLPs.

    The first group is for blocks with attention, and the second group is for blocks with another mixer. If
    the architecture has only one of these kinds of blocks, the result has only the group of this kind.
    """
    mixer = tuple(name for name in facts.mixer[:-1] if name not in facts.mixer_context)
    return tuple(readers for readers in (facts.attention_inputs, mixer) if readers)


def readers_of_mlp_norm(facts: Architecture) -> tuple[tuple[str, ...], ...]:
    """Return groups of layers that read the output of the norm before the MLP.

    The first group is for blocks with a dense MLP, and the second group is for blocks with a mixture of
    experts. If the architecture has only one of these kinds of blocks, the result has only the group of this
    kind.
    """
    routed = () if facts.experts_norm else (*of_experts(facts, facts.expert_inputs), *_present(facts.router))
    mixture = (*facts.shared_experts[:-1], *routed, *_present(facts.shared_expert_gate))
    return tuple(readers for readers in (facts.mlp_inputs, mixture) if readers)


def writers_of_attention(facts: Architecture) -> tuple[str, ...]:
    """Return the layers of attention, or of another mixer, whose outputs are added to the residual stream."""
    return _present(facts.attention_output, *facts.mixer[-1:])


def writers_of_mlp(facts: Architecture) -> tuple[str, ...]:
    """Return the layers of the MLP, or of the mixture of experts, whose outputs are added to the residual
    stream.
    """
    return (*_present(facts.mlp_output), *of_experts(facts, (facts.expert_output,)), *facts.shared_experts[-1:])


def writers_before_blocks(facts: Architecture) -> tuple[str, ...]:
    """Return names or patterns of modules outside the blocks. The outputs of these modules are added to the
    residual stream.
    """
    return (*facts.embeddings, *_present(facts.position_embeddings), *facts.inserted_embeddings)


def enclosing(names: tuple[str, ...]) -> str:
    """Return the name of the innermost module that contains all the modules in ``names``. ``""`` means the
    block.
    """
    first, *others = (name.split(".")[:-1] for name in names or ("",))
    common = [part for i, part in enumerate(first) if all(other[: i + 1] == first[: i + 1] for other in others)]
    return ".".join(common)


def _before_attention(facts: Architecture) -> Iterator[LayerMapping]:
    if facts.attention_norm is None or not facts.norm_has_weight:
        return
    parallel = readers_of_mlp_norm(facts) if facts.mlp_norm == facts.attention_norm else ((),)
    for own in readers_of_attention_norm(facts):
        for beside in parallel:
            yield _of_norm("norm", facts.attention_norm, (*own, *beside))


def _inside_attention(facts: Architecture) -> Iterator[LayerMapping]:
    for norm, readers in facts.attention_inner_norms:
        yield _of_norm("inner_norm", norm, readers)
    if facts.attention_value and facts.attention_output:
        yield LayerMapping("value", facts.attention_value, (facts.attention_output,), rows=facts.attention_value_rows)


def _before_mlp(facts: Architecture) -> Iterator[LayerMapping]:
    if facts.norm_has_weight and facts.mlp_norm is not None and facts.mlp_norm != facts.attention_norm:
        for readers in readers_of_mlp_norm(facts):
            yield _of_norm("norm", facts.mlp_norm, readers)
    if facts.norm_has_weight and facts.experts_norm is not None:
        yield _of_norm("norm", facts.experts_norm, of_experts(facts, facts.expert_inputs))


def _inside_mlp(facts: Architecture) -> Iterator[LayerMapping]:
    if facts.mlp_value and facts.mlp_output:
        yield LayerMapping("mlp_value", facts.mlp_value, (facts.mlp_output,), rows=facts.mlp_value_rows)
    if facts.experts and facts.expert_value:
        (value,) = of_experts(facts, (facts.expert_value,))
        yield LayerMapping("mlp_value", value, of_experts(facts, (facts.expert_output,)))
    if facts.shared_expert_value:
        yield LayerMapping("mlp_value", facts.shared_expert_value, facts.shared_experts[-1:], rows=facts.shared_expert_value_rows)


def _of_norm(kind: MappingKind, norm: str, readers: tuple[str, ...]) -> LayerMapping:
    return LayerMapping(kind, norm, readers, inspect=enclosing(readers) if len(readers) > 1 else None)


def _present(*names: str | None) -> tuple[str, ...]:
    return tuple(name for name in names if name)
