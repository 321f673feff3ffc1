"""SelectionProblem, the input of a selector: groups of layers, candidates, sizes, budget, model and data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import attrs
from torch import nn

from quark.calibration.batches import Call
from quark.calibration.transform_validation import BlockSource
from quark.config.architecture import Architecture
from quark.errors import ConfigError
from quark.models.plan.decoder_blocks import Block, decoder_blocks
from quark.models.plan.mixtures import ExpertNames
from quark.models.plan.plan_row import PlanRow
from quark.plugins.run_events import SILENT, RunEvents
from quark_workbench.mixed_precision.candidates import Candidate

__all__ = ["Budget", "Choices", "LayerGroup", "SelectionProblem", "layer_groups"]

Choices = Mapping[str, str]
"""Dictionary from name of group to name of candidate."""


@attrs.frozen(eq=False)
class SelectionProblem:
    """The task to choose one candidate for each group within a budget.

    Attributes:
        model: The float model. Its tensors may be on the meta device until ``source`` loads their block.
        source: An object that loads and releases the tensors of blocks.
        architecture: Facts about the model family; None for an unknown family.
        groups: The groups of layers, in the model's order.
        candidates: Dictionary from name to candidate.
        sizes: For each group, a dictionary from name of candidate to bytes. It lacks candidates that do not
            fit every layer of the group.
        other_bytes: Bytes of all tensors of the checkpoint that are outside the groups.
        budget: The budget.
        data: Inputs of the forward passes for calibration.
        events: An object to which a slow selector reports its progress, with
            `quark.plugins.run_events.RunEvents.blocks` or `quark.plugins.run_events.RunEvents.batches`.
    """

    model: nn.Module
    source: BlockSource
    architecture: Architecture | None
    groups: Sequence[LayerGroup]
    candidates: Mapping[str, Candidate]
    sizes: Mapping[str, Mapping[str, int]]
    other_bytes: int
    budget: Budget
    data: Sequence[Call] = ()
    events: RunEvents = SILENT

    @property
    def blocks(self) -> list[Block]:
        """The decoder blocks of the model, in order."""
        return decoder_blocks(self.model, self.architecture)

    @property
    def weights(self) -> int:
        """The number of weights of all groups together."""
        return sum(group.weights for group in self.groups)

    @property
    def smallest(self) -> int:
        """The bytes of all groups if each group has its smallest candidate."""
        return sum(min(sizes.values()) for sizes in self.sizes.values())

    @property
    def largest(self) -> int:
        """The bytes of all groups if each group has its largest candidate."""
        return sum(max(sizes.values()) for sizes in self.sizes.values())

    @property
    def most_bytes(self) -> int | None:
        """The bytes that the budget allows for the groups, or None if the budget is a KL divergence."""
        if self.budget.bits is not None:
            return int(self.budget.bits * self.weights / 8 + 1e-6)
        return None if self.budget.size is None else self.budget.size - self.other_bytes

    def bytes_of(self, choices: Choices) -> int:
        """Return the bytes of all groups if each group has its candidate in ``choices``."""
        return sum(self.sizes[group.name][choices[group.name]] for group in self.groups)

    def bits_of(self, group_bytes: int) -> float:
        """Return the stored bits per weight if all groups together need ``group_bytes`` bytes."""
        return 8 * group_bytes / self.weights

    def refuse_unreachable(self) -> None:
        """Raise an error if the budget is too small for every choice, or too large to restrict the choice.

        Raises:
            ConfigError: The budget is out of range. The message names the range that the candidates reach.
        """
        most = self.most_bytes
        if most is None or self.smallest <= most <= self.largest:
            return
        low, high = self.smallest, self.largest
        reached = (
            f"{self.bits_of(low):.4g} to {self.bits_of(high):.4g} bits per weight"
            if self.budget.bits is not None
            else f"{low + self.other_bytes:,} to {high + self.other_bytes:,} bytes"
        )
        fix = "a larger budget, or a smaller candidate" if most < low else "a smaller budget, or a larger candidate"
        raise ConfigError(
            f"a budget of {self.budget} cannot be met with {', '.join(self.candidates)}: they reach {reached} over {len(self.groups)} "
            f"groups of layers. Give {fix}"
        )


def _positive(_: object, attribute: Any, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise ConfigError(f"a budget of {attribute.name}={value} leaves nothing to choose from: give a positive number")


@attrs.frozen(kw_only=True)
class Budget:
    """A limit for the choice of schemes. Exactly one attribute must be set.

    Attributes:
        bits: Largest mean number of stored bits per weight, including scales, over the layers of the
            selection. Layers that the template keeps in float, such as the output head, do not count.
        size: Largest size of all tensors of the checkpoint, in bytes.
        kl: Largest mean KL divergence from the float model on the calibration tokens, in nats per token.

    Raises:
        ConfigError: No attribute or more than one attribute is set, or the value is not positive.
    """

    bits: float | None = attrs.field(default=None, validator=_positive)
    size: int | None = attrs.field(default=None, validator=_positive)
    kl: float | None = attrs.field(default=None, validator=_positive)

    def __attrs_post_init__(self) -> None:
        values = (("bits", self.bits), ("size", self.size), ("kl", self.kl))
        given = [name for name, value in values if value is not None]
        if len(given) != 1:
            said = "none is given" if not given else f"{' and '.join(given)} are given"
            raise ConfigError(
                f"a selection needs exactly one budget, and {said}: give bits per weight, a size in bytes, or a KL divergence"
            )

    def __str__(self) -> str:
        if self.bits is not None:
            return f"{self.bits:g} bits per weight"
        return f"{self.size:,} bytes" if self.size is not None else f"a KL divergence of {self.kl:g} nats per token"


@attrs.frozen
class LayerGroup:
    """Layers that must get the same scheme.

    Attributes:
        name: Full name of a single layer. For several layers, the common parent and the names in the parent:
            ``"model.layers.0.mlp.gate_proj/up_proj"``.
        shapes: Dictionary from full name of layer to the shape of its weight, ``[out, in]``.
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def layers(self) -> tuple[str, ...]:
        """The full names of the group's layers, in the model's order."""
        return tuple(self.shapes)

    @property
    def weights(self) -> int:
        """The number of weights of all layers of the group."""
        return sum(prod(shape) for shape in self.shapes.values())


def layer_groups(rows: Sequence[PlanRow], architecture: Architecture | None) -> tuple[LayerGroup, ...]:
    """Divide layers into groups, and return the groups in the model's order.

    Layers that runtimes fuse into one matrix form a group, and so do the layers of all experts in a module.
    If ``rows`` lack some layers of a group, the group has only the other layers.

    Args:
        rows: Rows of the plan for the layers to group.
        architecture: Facts about the model family, which name the fused layers and the experts. If it is
            None, each layer is a group.
    """
    fused = () if architecture is None else architecture.fused
    experts = ExpertNames(architecture)
    members: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {}
    for row in rows:
        members.setdefault(_key(row.name, fused, experts), {})[row.name] = row.shape
    return tuple(LayerGroup(_name(key, tuple(shapes)), shapes) for key, shapes in members.items())


def _key(name: str, fused: Sequence[Sequence[str]], experts: ExpertNames) -> tuple[str, str]:
    """Return the key of a layer's group.

    It is the full name of the module that contains the group, and the joined last parts of the layers' names.
    For experts, the second part is empty.
    """
    if experts.projection(name) is not None:
        return experts.expert(name).rpartition(".")[0], ""
    parent, _, suffix = name.rpartition(".")
    together = next((suffixes for suffixes in fused if suffix in suffixes), (suffix,))
    return parent, "/".join(together)


def _name(key: tuple[str, str], layers: Sequence[str]) -> str:
    parent, together = key
    if not together:
        return parent
    names = "/".join(layer.rpartition(".")[2] for layer in layers)
    return f"{parent}.{names}" if parent else names
