"""The residual stream in the modules of a model: which of them write to it and which read it through which norm, by a family's facts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

import attrs
from torch import nn

from quark.config.architecture import Architecture
from quark.errors import UnsupportedError
from quark.hf.expert_forms import expert_parts
from quark_algos.mappings.mapping import readers_of_attention_norm, readers_of_mlp_norm, writers_of_attention, writers_of_mlp
from quark_algos.mappings.resolve import submodule
from quark_algos.rotation.config import RotationConfig

__all__ = ["Reading", "Stream", "check", "in_block", "matching", "norms_and_readers", "outside_blocks", "see_single_experts"]


@attrs.frozen(eq=False)
class Reading:
    """A norm and what reads the stream through it.

    Attributes:
        name: Of the norm.
        norm: The norm.
        readers: By name, the same module never twice.
    """

    name: str
    norm: nn.Module
    readers: dict[str, nn.Module]


@attrs.frozen(eq=False)
class Stream:
    """What touches the stream in one place, a block or all around the blocks.

    Attributes:
        writers: Projections and embeddings whose outputs are added to the stream, by name.
        readings: Norms with their readers.
    """

    writers: dict[str, nn.Module]
    readings: tuple[Reading, ...]


def check(facts: Architecture) -> None:
    """See that a family can be rotated.

    Raises:
        UnsupportedError: It cannot; the message says why.
    """
    reason = facts.unsupported.get("rotation") or RotationConfig.refusal(facts)
    if reason is not None:
        raise UnsupportedError(f"{facts.model_type} cannot be rotated: {reason}; leave rotation out of the algorithms")


def outside_blocks(model: nn.Module, facts: Architecture) -> Stream:
    """What writes to the stream before the first block, and what reads it after the last.

    Args:
        model: The whole model; what is in its blocks may be on the meta device.
        facts: About its family.

    Raises:
        UnsupportedError: The family cannot be rotated, or this model has not all that its usual variant has.
    """
    check(facts)
    needed = [name for name in (*facts.embeddings, facts.position_embeddings) if name]
    writers = matching(model, (*needed, *facts.inserted_embeddings))
    final, head = facts.final_norm or "", facts.head or ""
    found = matching(model, (final, head))
    missing = [name for name in (*needed, final, head) if name not in writers and name not in found]
    if missing:
        raise UnsupportedError(f"this {facts.model_type} cannot be rotated: it has no {', '.join(missing)}; leave rotation out")
    return Stream(writers, (Reading(final, found[final], {head: found[head]}),))


def in_block(block: nn.Module, facts: Architecture) -> Stream:
    """What reads the stream and writes to it in one decoder block; names are relative to it.

    Raises:
        UnsupportedError: The family cannot be rotated; or in this block there are readers without their norm, norms without readers, or
            fused experts.
    """
    check(facts)
    readings = []
    for name, readers in norms_and_readers(facts).items():
        norms, found = matching(block, (name,)), matching(block, readers)
        if bool(norms) != bool(found):
            has, lacks = (name, "any of " + ", ".join(readers)) if norms else (", ".join(found), name)
            raise UnsupportedError(
                f"a block of this {facts.model_type} cannot be rotated: it has {has} but not {lacks}; leave rotation out"
            )
        if norms:
            readings.append(Reading(name, norms[name], found))
    writers = matching(block, (*writers_of_attention(facts), *writers_of_mlp(facts)))
    see_single_experts(block, facts, writers)
    if not readings or not writers:
        raise UnsupportedError(f"a block of this {facts.model_type} cannot be rotated: nothing that its facts name is in it")
    return Stream(writers, tuple(readings))


def norms_and_readers(facts: Architecture) -> dict[str, tuple[str, ...]]:
    """The norms of a block with the patterns of what reads the stream through them; a norm that feeds attention and MLP, once."""
    places: dict[str, tuple[str, ...]] = {}
    for norm, groups in ((facts.attention_norm, readers_of_attention_norm(facts)), (facts.mlp_norm, readers_of_mlp_norm(facts))):
        places[norm or ""] = (*places.get(norm or "", ()), *chain.from_iterable(groups))
    return places


def matching(module: nn.Module, patterns: Iterable[str]) -> dict[str, nn.Module]:
    """Submodules that names or patterns mean, each once; a star stands for one part of a name."""
    patterns = tuple(patterns)
    found = {name: m for name in patterns if "*" not in name and (m := submodule(module, name)) is not None}
    starred = [re.compile(re.escape(pattern).replace(r"\*", r"[^.]+")) for pattern in patterns if "*" in pattern]
    if starred:
        found |= {name: m for name, m in module.named_modules() if any(one.fullmatch(name) for one in starred)}
    return {name: m for m, name in {m: name for name, m in found.items()}.items()}


def see_single_experts(block: nn.Module, facts: Architecture, writers: Mapping[str, nn.Module]) -> None:
    """See that the experts of a block, if there are any, are separate layers and write to the stream; else UnsupportedError."""
    holder = submodule(block, facts.experts) if facts.experts else None
    if holder is None or not any(True for _ in _own_matrices(holder)):
        return
    if not any(name.startswith(f"{facts.experts}.") for name in writers):
        parts = expert_parts(holder, facts.expert_form, facts.expert_inputs, facts.expert_output)
        cure = (
            "they are of a form that cannot be taken apart: rotate nothing"
            if parts is None
            else "they are taken apart where the configuration quantizes one of their layers: do not exclude them, or rotate nothing"
        )
        raise UnsupportedError(f"a block of this {facts.model_type} cannot be rotated: its experts ({facts.experts}) are fused; {cure}")


def _own_matrices(module: nn.Module) -> Iterator[nn.Parameter]:
    return (p for p in module.parameters() if p.ndim >= 2)
