"""Collector: the statistics of the input of one input group, and a few of its tokens to validate codes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quark.algorithms import HeldOut, Statistic
from quark.calibration.forwards import Forward
from quark.calibration.held_out import FEWEST_TOKENS, TOKENS_PER_CHANNEL, held_out_tokens
from quark.calibration.sample_grid import SampleGrid, Sums
from quark.models.layers import QuantizerModule
from quark.plugins.catalog import catalog
from quark.plugins.measuring import InputSeen

_TOKENS_SHOWN = 128
"""Tokens that plugins measure: those of the beginning of a text, where activations are largest."""


class Collector:
    """Statistics of one input, and some of its tokens.

    Where tokens are few for the number of channels, the kept ones are in no statistic.

    Args:
        kinds: Of the statistics.
        columns: K, the number of input channels.
        device: Where the inputs lie.
        tokens: How many tokens there will be on all ranks, or about so many.
        grid: The calls that bring them.
        outputs: N, where references are the output of one layer in the float model, without bias, in place of
            its input; None where they are inputs.
        inputs_last: Whether all inputs stay as they are until `flush`.

    Attributes:
        is_of_outputs: Whether references are outputs.
        tokens: How many were seen, held out or not; after `complete`, on all ranks.
        statistics: By class, of all tokens, or of all that are not held out; empty before `complete`.
        held_out: Tokens to validate on; None where they are too few, and before `complete`.
        samples: What plugins keep of this rank's first tokens.
    """

    def __init__(
        self,
        kinds: Sequence[type[Statistic]],
        columns: int,
        device: torch.device,
        tokens: int,
        grid: SampleGrid,
        *,
        outputs: int | None = None,
        inputs_last: bool = False,
    ) -> None:
        self.is_of_outputs = outputs is not None
        self.tokens = 0
        self.statistics: dict[type[Statistic], Statistic] = {}
        self.held_out: HeldOut | None = None
        self.samples: dict[str, Any] = {}
        self._has_shown = False
        self._grid = grid
        self._sums = Sums(kinds, columns, device, grid, outputs=outputs, inputs_last=inputs_last)
        self._number_held_out = held_out_tokens(tokens)
        self._is_apart = tokens < TOKENS_PER_CHANNEL * columns
        self._held_out: list[tuple[Tensor, Tensor | None]] = []

    @property
    def flops(self) -> int:
        """Floating-point operations that the statistics took at least, on all ranks together.

        0 before `complete`.
        """
        return sum(statistic.flops for statistic in self.statistics.values())

    def flush(self) -> None:
        """Compute the sums that the statistics have put off."""
        for statistic in self.statistics.values():
            statistic.flush()

    def take(self, x: Tensor, quantizer: QuantizerModule | None, reference: Tensor | None, forward: Forward, position: int) -> int:
        """Take in the tokens of the layers' input in one forward, and return their number.

        Args:
            x: The input, float.
            quantizer: Of the input; None where the statistics are of the float input.
            reference: The input in the float model, or the output; None if unknown. One of another shape does
                not count.
            forward: Brings the input.
            position: As of `update`.
        """
        x = x.detach()  # a parameter, if a model projects its table of positions
        plain = x.flatten(0, -2)
        seen = plain if quantizer is None else quantizer(x).flatten(0, -2)
        if not self._has_shown and len(seen):
            self._has_shown, rounded = True, None if quantizer is None else seen[:_TOKENS_SHOWN]
            catalog().measure(InputSeen(x=plain[:_TOKENS_SHOWN], rounded=rounded, samples=self.samples))
        if reference is not None:
            reference = reference.detach().flatten(0, -2) if reference.shape[:-1] == x.shape[:-1] else None
        self.update(seen, reference, forward.number, position)
        return len(seen)

    def update(self, x: Tensor, reference: Tensor | None, call: int, position: int) -> None:
        """Take in tokens of a call.

        Args:
            x, reference: As of `Statistic.update`.
            call: Its number; calls come in order.
            position: How many tokens the calls before it have, those of other ranks included, or about so
                many: the first are held out.
        """
        self.tokens += x.shape[0]
        held = max(0, self._number_held_out - position)
        if held:
            self._held_out.append((x[:held], None if reference is None else reference[:held]))
            if self._is_apart:
                x, reference = x[held:], None if reference is None else reference[held:]
        self._sums.update(x, reference, call)

    def complete(self) -> None:
        """Merge statistics and held-out tokens over all ranks; collective, after the last update."""
        ranks = self._grid.ranks
        self.tokens = ranks.sum(self.tokens)
        self.statistics = self._sums.of_all_ranks()
        held_out = [pair for pairs in ranks.gather(self._held_out) for pair in pairs]
        if sum(len(x) for x, _ in held_out) >= FEWEST_TOKENS:
            references = [reference for _, reference in held_out if reference is not None]
            complete = len(references) == len(held_out)
            known = {"float_outputs" if self.is_of_outputs else "reference": torch.cat(references)} if complete else {}
            self.held_out = HeldOut(torch.cat([x for x, _ in held_out]), **known)
