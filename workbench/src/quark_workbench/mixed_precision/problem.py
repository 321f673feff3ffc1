"""SelectionProblem: what a selector chooses from: groups, candidates, the bytes of each choice, a budget, and the model with its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
from torch import nn

from quark.calibration.batches import Call
from quark.config.architecture import Architecture
from quark.errors import ConfigError
from quark.models.plan.decoder_blocks import Block, decoder_blocks
from quark.plugins.run_events import SILENT, RunEvents
from quark.runs.source import BlockSource
from quark_workbench.mixed_precision.budget import Budget
from quark_workbench.mixed_precision.candidates import Candidate
from quark_workbench.mixed_precision.layer_groups import LayerGroup

__all__ = ["Choices", "SelectionProblem"]

Choices = Mapping[str, str]
"""Name of a candidate by name of group."""


@attrs.frozen(eq=False)
class SelectionProblem:
    """A choice to be made: one candidate for each group, within a budget.

    Attributes:
        model: The float model. Its tensors may be on the meta device until ``source`` has loaded their block.
        source: Loads and releases the tensors of blocks.
        architecture: Facts about the family; None where it is not known.
        groups: What is chosen for, in the model's order.
        candidates: What there is to choose from, by name.
        sizes: Bytes of each group in each candidate that fits all its layers.
        other_bytes: Bytes of all other tensors of the checkpoint.
        budget: What may be spent.
        data: Calibration forwards.
        events: Hears how far a selector is that takes long: `quark.plugins.run_events.RunEvents.blocks`,
            `quark.plugins.run_events.RunEvents.batches`.
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
        """The fewest bytes that the groups can take."""
        return sum(min(sizes.values()) for sizes in self.sizes.values())

    @property
    def largest(self) -> int:
        """The most bytes that the groups can take."""
        return sum(max(sizes.values()) for sizes in self.sizes.values())

    @property
    def most_bytes(self) -> int | None:
        """The most bytes that the groups may take under the budget; None where it is a divergence."""
        if self.budget.bits is not None:
            return int(self.budget.bits * self.weights / 8 + 1e-6)
        return None if self.budget.size is None else self.budget.size - self.other_bytes

    def bytes_of(self, choices: Choices) -> int:
        """Return the bytes of the groups under some choices."""
        return sum(self.sizes[group.name][choices[group.name]] for group in self.groups)

    def bits_of(self, group_bytes: int) -> float:
        """Return the stored bits per weight where the groups take so many bytes."""
        return 8 * group_bytes / self.weights

    def refuse_unreachable(self) -> None:
        """Raise where no choice meets the budget, or where it is above what the largest choice takes.

        Raises:
            ConfigError: Names the range that can be reached.
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
            f"a budget of {self.budget} cannot be met with {', '.join(self.candidates)}: these reach {reached} over {len(self.groups)} "
            f"groups of layers. Give {fix}"
        )
