"""Writers and readers of the residual stream in a model, with the norm of each reader.

They follow from the architecture.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import chain

import attrs
from torch import nn

from quark.config.architecture import Architecture
from quark.errors import UnsupportedError
from quark_algos.mappings.mapping import readers_of_attention_norm, readers_of_mlp_norm, writers_of_attention, writers_of_mlp
from quark_algos.mappings.resolve import submodule
from quark_algos.rotation.config import RotationConfig

__all__ = ["Reading", "Stream", "check", "in_block", "matching", "norms_and_readers", "outside_blocks", "see_single_experts"]


@attrs.frozen(eq=False)
class Reading:
    """A norm and the layers that read the stream through it.

    Attributes:
        name: Name of the norm.
        norm: The norm.
        readers: The layers by name; no module occurs twice.
    """

    name: str
    norm: nn.Module
    readers: dict[str, nn.Module]


@attrs.frozen(eq=False)
class Stream:
    """The modules that touch the stream, in one block or outside the blocks.

    Attributes:
        writers: Projections and embeddings whose outputs are added to the stream, by name.
        readings: Norms with their readers.
    """

    writers: dict[str, nn.Module]
    readings: tuple[Reading, ...]


def check(facts: Architecture) -> None:
    """Check that the residual stream of an architecture can be rotated.

    Raises:
        UnsupportedError: It cannot; the message gives the reason.
    """
    reason = RotationConfig.r1_refusal(facts)
    if reason is not None:
        raise UnsupportedError(
            f"the residual stream of {facts.model_type} cannot be rotated: {reason}. Set r1=False, which keeps r2, r3 and r4, or leave "
            f"rotation out"
        )


def outside_blocks(model: nn.Module, facts: Architecture) -> Stream:
    """Return the writers before the first block and the readers after the last.

    Args:
        model: The whole model; its blocks may be on the meta device.
        facts: Architecture of the model.

    Raises:
        UnsupportedError: The architecture cannot be rotated, or this model lacks a module of the usual
            variant.
    """
    check(facts)
    needed = [name for name in (*facts.embeddings, facts.position_embeddings) if name]
    writers = matching(model, (*needed, *facts.inserted_embeddings))
    final, head = facts.final_norm or "", facts.head or ""
    readers = matching(model, (final, head))
    missing = [name for name in (*needed, final, head) if name not in writers and name not in readers]
    if missing:
        raise UnsupportedError(f"this {facts.model_type} cannot be rotated: it has no {', '.join(missing)}. Leave rotation out")
    return Stream(writers, (Reading(final, readers[final], {head: readers[head]}),))


def in_block(block: nn.Module, facts: Architecture) -> Stream:
    """Return the writers and readers in one decoder block, by names relative to the block.

    Raises:
        UnsupportedError: The architecture cannot be rotated; or the block has readers without their norm,
            norms without readers, or fused experts.
    """
    check(facts)
    readings = []
    for name, patterns in norms_and_readers(facts).items():
        norms, readers = matching(block, (name,)), matching(block, patterns)
        if bool(norms) != bool(readers):
            has, lacks = (name, "any of " + ", ".join(patterns)) if norms else (", ".join(readers), name)
            raise UnsupportedError(
                f"a block of this {facts.model_type} cannot be rotated: it has {has} but not {lacks}. Leave rotation out"
            )
        if norms:
            readings.append(Reading(name, norms[name], readers))
    writers = matching(block, (*writers_of_attention(facts), *writers_of_mlp(facts)))
    see_single_experts(block, facts, writers)
    if not readings or not writers:
        raise UnsupportedError(
            f"a block of this {facts.model_type} cannot be rotated: its architecture names modules that it lacks. Leave rotation out"
        )
    return Stream(writers, tuple(readings))


def norms_and_readers(facts: Architecture) -> dict[str, tuple[str, ...]]:
    """Return the patterns of readers by the name of their norm.

    A norm that attention and MLP share occurs once.
    """
    patterns: dict[str, tuple[str, ...]] = {}
    for norm, groups in ((facts.attention_norm, readers_of_attention_norm(facts)), (facts.mlp_norm, readers_of_mlp_norm(facts))):
        patterns[norm or ""] = (*patterns.get(norm or "", ()), *chain.from_iterable(groups))
    return patterns


def matching(module: nn.Module, patterns: Iterable[str]) -> dict[str, nn.Module]:
    """Return the submodules that match names or patterns, each once; a star matches one part of a name."""
    patterns = tuple(patterns)
    matches = {name: m for name in patterns if "*" not in name and (m := submodule(module, name)) is not None}
    starred = [re.compile(re.escape(pattern).replace(r"\*", r"[^.]+")) for pattern in patterns if "*" in pattern]
    if starred:
        matches |= {name: m for name, m in module.named_modules() if any(one.fullmatch(name) for one in starred)}
    return {name: m for m, name in {m: name for name, m in matches.items()}.items()}


def see_single_experts(block: nn.Module, facts: Architecture, writers: Mapping[str, nn.Module]) -> None:
    """Check that the experts of a block, if any, are separate layers that write to the stream.

    Raises UnsupportedError for other experts.
    """
    holder = submodule(block, facts.experts) if facts.experts else None
    if holder is None or all(parameter.ndim < 2 for parameter in holder.parameters()):
        return
    if not any(name.startswith(f"{facts.experts}.") for name in writers):
        raise UnsupportedError(
            f"a block of this {facts.model_type} cannot be rotated: its experts ({facts.experts}) are fused in a form that cannot be "
            f"split. Leave rotation out"
        )
