"""Sites: the places in a decoder block where a scale can move from one operation to those that read it, derived from a family's facts.

The output of ``prev`` reaches each of ``layers`` linearly, channel by channel, and nothing else reads it. So its channels may be divided by
any positive numbers, if the columns of those layers are multiplied by them: the block computes what it did before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import attrs

from quark.config.architecture import Architecture, Rows

__all__ = [
    "LayerMapping",
    "SiteKind",
    "enclosing",
    "linear_layers",
    "mappings_of",
    "of_experts",
    "readers_of_attention_norm",
    "readers_of_mlp_norm",
    "writers_of_attention",
    "writers_of_mlp",
]

SiteKind = Literal["norm", "inner_norm", "value", "mlp_value", "by_module"]
"""``by_module``: a user's mapping that the family does not have; the module in a block shows whether it is a norm or a projection."""


@attrs.frozen
class LayerMapping:
    """One such place. Names are relative to a decoder block; a star is the number of an expert, the same in ``prev`` and ``layers``.

    A site holds in the blocks that have all its modules: the sites of mixtures and of dense MLPs, say, are in different blocks. Where
    ``prev`` has no star and layers have, every expert reads it; experts must then be separate layers, or the site does not hold.

    Attributes:
        kind: What ``prev`` is: a norm before attention or MLP, a norm inside attention, or a projection. Channels of attention's values are
            those of the key-value heads, each of which some heads share.
        prev: What is divided: a norm's weight and bias, or the output rows and the bias of a projection.
        layers: All that read it: projections, then what stays float, such as routers, which must be multiplied as well.
        inspect: The module around them, ``""`` for the whole block; None where there is one layer only.
        rows: Which rows of ``prev`` are meant, where it is a projection: one for each column of ``layers``, or for each channel of
            key-value heads.
    """

    kind: SiteKind
    prev: str
    layers: tuple[str, ...]
    inspect: str | None = None
    rows: Rows = "all"

    def documented(self) -> dict[str, Any]:
        """The form that ``scaling_layers`` has in configurations; ``rows`` is left out where all are meant."""
        form: dict[str, Any] = {"prev_op": self.prev, "layers": list(self.layers), "inp": self.layers[0], "module2inspect": self.inspect}
        return form if self.rows == "all" else form | {"rows": self.rows}


def mappings_of(facts: Architecture) -> tuple[LayerMapping, ...]:
    """All sites of a family, in the order in which data flows."""
    return (*_before_attention(facts), *_inside_attention(facts), *_before_mlp(facts), *_inside_mlp(facts))


def linear_layers(facts: Architecture) -> tuple[str, ...]:
    """Names of all projections of a block, in the order in which data flows; those of experts have a star for the number."""
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
    """Names in one expert as names in a block, with a star for its number; none in a family without experts."""
    return tuple(f"{facts.experts}.*.{name}" for name in names) if facts.experts else ()


def readers_of_attention_norm(facts: Architecture) -> tuple[tuple[str, ...], ...]:
    """What the norm before attention feeds, apart from an MLP: in blocks with attention, and in those with what stands in its place."""
    mixer = tuple(name for name in facts.mixer[:-1] if name not in facts.mixer_context)
    return tuple(found for found in (facts.attention_inputs, mixer) if found)


def readers_of_mlp_norm(facts: Architecture) -> tuple[tuple[str, ...], ...]:
    """What the norm before the MLP feeds: in blocks with a dense MLP, and in those with a mixture."""
    mixture = (*facts.shared_experts[:-1], *of_experts(facts, facts.expert_inputs), *_present(facts.router, facts.shared_expert_gate))
    return tuple(found for found in (facts.mlp_inputs, mixture) if found)


def writers_of_attention(facts: Architecture) -> tuple[str, ...]:
    """What attention, or what stands in its place, adds to the residual stream with."""
    return _present(facts.attention_output, *facts.mixer[-1:])


def writers_of_mlp(facts: Architecture) -> tuple[str, ...]:
    """What the MLP or the mixture adds to the residual stream with."""
    return (*_present(facts.mlp_output), *of_experts(facts, (facts.expert_output,)), *facts.shared_experts[-1:])


def enclosing(names: tuple[str, ...]) -> str:
    """The innermost module around all of them; ``""`` is the block."""
    first, *others = (name.split(".")[:-1] for name in names)
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


def _inside_mlp(facts: Architecture) -> Iterator[LayerMapping]:
    if facts.mlp_value and facts.mlp_output:
        yield LayerMapping("mlp_value", facts.mlp_value, (facts.mlp_output,), rows=facts.mlp_value_rows)
    if facts.experts and facts.expert_value:
        (value,) = of_experts(facts, (facts.expert_value,))
        yield LayerMapping("mlp_value", value, of_experts(facts, (facts.expert_output,)))
    if facts.shared_expert_value:
        yield LayerMapping("mlp_value", facts.shared_expert_value, facts.shared_experts[-1:], rows=facts.shared_expert_value_rows)


def _of_norm(kind: SiteKind, norm: str, readers: tuple[str, ...]) -> LayerMapping:
    return LayerMapping(kind, norm, readers, inspect=enclosing(readers) if len(readers) > 1 else None)


def _present(*names: str | None) -> tuple[str, ...]:
    return tuple(name for name in names if name)
