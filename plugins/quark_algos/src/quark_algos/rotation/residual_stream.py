"""Functions that find the writers and readers of the residual stream in a model. The architecture of the
model names them.

A writer is a layer whose output is added to the stream. A reader is a layer that gets the stream through a
norm.
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
    """A norm, and the layers that read the residual stream through this norm.

    Attributes:
        name: Name of the norm.
        norm: The norm.
        readers: A dictionary from name to layer. No module occurs twice.
    """

    name: str
    norm: nn.Module
    readers: dict[str, nn.Module]


@attrs.frozen(eq=False)
class Stream:
    """The modules of one block, or the modules outside the blocks, that read or write the residual stream.

    Attributes:
        writers: A dictionary from name to module, with the projections and embeddings whose outputs are added
            to the stream.
        readings: The norms, each with its readers.
    """

    writers: dict[str, nn.Module]
    readings: tuple[Reading, ...]


def check(facts: Architecture) -> None:
    """Check that the residual stream of an architecture can be rotated.

    Raises:
        UnsupportedError: The stream cannot be rotated. The message states the reason.
    """
    reason = RotationConfig.r1_refusal(facts)
    if reason is not None:
        raise UnsupportedError(
            f"the residual stream of {facts.model_type} cannot be rotated: {reason}. Set r1=False to use only r2, r3 and r4, or leave out "
            f"rotation"
        )


def outside_blocks(model: nn.Module, facts: Architecture) -> Stream:
    """Return the writers before the first block and the readers after the last block.

    Args:
        model: The whole model. Its blocks may be on the meta device.
        facts: Architecture of the model.

    Raises:
        UnsupportedError: The architecture cannot be rotated, or this model does not have a module that the
            architecture names.
    """
    check(facts)
    needed = [name for name in (*facts.embeddings, facts.position_embeddings) if name]
    writers = matching(model, (*needed, *facts.inserted_embeddings))
    final, head = facts.final_norm or "", facts.head or ""
    readers = matching(model, (final, head))
    missing = [name for name in (*needed, final, head) if name not in writers and name not in readers]
    if missing:
        raise UnsupportedError(f"this {facts.model_type} cannot be rotated, because it has no {', '.join(missing)}. Leave out rotation")
    return Stream(writers, (Reading(final, readers[final], {head: readers[head]}),))


def in_block(block: nn.Module, facts: Architecture) -> Stream:
    """Return the writers and readers in one decoder block. Their names are relative to the block.

    Raises:
        UnsupportedError: The architecture cannot be rotated, or the block has readers without a norm, a norm
            without readers, or fused experts.
    """
    check(facts)
    readings = []
    for name, patterns in norms_and_readers(facts).items():
        norms, readers = matching(block, (name,)), matching(block, patterns)
        if bool(norms) != bool(readers):
            has, lacks = (name, "any of " + ", ".join(patterns)) if norms else (", ".join(readers), name)
            raise UnsupportedError(
                f"a block of this {facts.model_type} cannot be rotated, because it has {has} but not {lacks}. Leave out rotation"
            )
        if norms:
            readings.append(Reading(name, norms[name], readers))
    writers = matching(block, (*writers_of_attention(facts), *writers_of_mlp(facts)))
    see_single_experts(block, facts, writers)
    if not readings or not writers:
        raise UnsupportedError(
            f"a block of this {facts.model_type} cannot be rotated, because it lacks modules that the template names. Leave out rotation"
        )
    return Stream(writers, tuple(readings))


def norms_and_readers(facts: Architecture) -> dict[str, tuple[str, ...]]:
    """Return a dictionary from the name of each norm to the name patterns of its readers.

    A norm that attention and MLP share occurs once.
    """
    patterns: dict[str, tuple[str, ...]] = {}
    for norm, groups in ((facts.attention_norm, readers_of_attention_norm(facts)), (facts.mlp_norm, readers_of_mlp_norm(facts))):
        patterns[norm or ""] = (*patterns.get(norm or "", ()), *chain.from_iterable(groups))
    return patterns


def matching(module: nn.Module, patterns: Iterable[str]) -> dict[str, nn.Module]:
    """Return the submodules whose names match one of the patterns, as a dictionary from name to submodule.

    Each submodule occurs once. A star in a pattern matches one part of a name.
    """
    patterns = tuple(patterns)
    matches = {name: m for name in patterns if "*" not in name and (m := submodule(module, name)) is not None}
    starred = [re.compile(re.escape(pattern).replace(r"\*", r"[^.]+")) for pattern in patterns if "*" in pattern]
    if starred:
        matches |= {name: m for name, m in module.named_modules() if any(one.fullmatch(name) for one in starred)}
    return {name: m for m, name in {m: name for name, m in matches.items()}.items()}


def see_single_experts(block: nn.Module, facts: Architecture, writers: Mapping[str, nn.Module]) -> None:
    """Raise UnsupportedError if the experts of a block are not separate layers that write to the residual
    stream.

    If the block has no experts, no error is raised.
    """
    holder = submodule(block, facts.experts) if facts.experts else None
    if holder is None or all(parameter.ndim < 2 for parameter in holder.parameters()):
        return
    if not any(name.startswith(f"{facts.experts}.") for name in writers):
        raise UnsupportedError(
            f"a block of this {facts.model_type} cannot be rotated, because its experts ({facts.experts}) are fused in a form that "
            f"cannot be split. Leave out rotation"
        )
