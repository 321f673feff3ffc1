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
"""Number of tokens that plugins measure: the first tokens, because their activations are the largest."""


class Collector:
    """Statistics of one input, and some of its tokens.

    If there are few tokens for the number of channels, no statistic contains the held-out tokens.

    Args:
        kinds: Classes of the statistics.
        columns: K, the number of input channels.
        device: Device of the inputs.
        tokens: Expected number of tokens on all ranks, at least roughly.
        grid: The calls of the run.
        outputs: N, the number of a layer's outputs, if the references are its outputs in the float model,
            without bias. None if the references are inputs.
        inputs_last: Whether all inputs stay unchanged until `flush`.

    Attributes:
        is_of_outputs: Whether references are outputs.
        tokens: Number of tokens so far, including held-out ones; after `complete`, on all ranks.
        statistics: Statistics by class, of all tokens, or of all that are not held out; empty before
            `complete`.
        held_out: Tokens to validate on; None if they are too few, and before `complete`.
        samples: Samples of this rank's first tokens, by name of the plugin that keeps them.
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
        """Lower bound of the statistics' floating-point operations on all ranks; 0 before `complete`."""
        return sum(statistic.flops for statistic in self.statistics.values())

    def flush(self) -> None:
        """Compute the sums that the statistics have postponed."""
        for statistic in self.statistics.values():
            statistic.flush()

    def take(self, x: Tensor, quantizer: QuantizerModule | None, reference: Tensor | None, forward: Forward, position: int) -> int:
        """Process the tokens of the layers' input in one forward, and return their number.

        Args:
            x: The input, float.
            quantizer: Quantizer of the input; None if statistics use the float input.
            reference: The input in the float model, or the output; None if unknown. A reference of another
                shape is ignored.
            forward: The forward that has the input.
            position: As in `update`.
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
        """Process tokens of a call.

        Args:
            x, reference: As in `Statistic.update`.
            call: Its number; calls come in order.
            position: Number of tokens in earlier calls, including other ranks' calls, at least roughly: the
                first tokens are held out.
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
