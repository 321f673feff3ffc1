"""Collector: collects statistics of the input of one input group. It also holds out a few tokens, which are
used to validate codes.
"""

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
"""Number of tokens on which plugins measure. These are the first tokens, because they have the largest
activations.
"""


class Collector:
    """Collects statistics of one input, and holds out some of the input's tokens.

    The statistics do not use the held-out tokens if there are few tokens per channel
    (`quark.calibration.held_out.TOKENS_PER_CHANNEL`).

    Args:
        kinds: Classes of the statistics.
        columns: K, the number of input channels.
        device: Device of the inputs.
        tokens: Expected number of tokens on all ranks. An approximate number is enough.
        grid: The calls of the run.
        outputs: N, the number of output channels of the layer, if the references are outputs. Such a
            reference is the layer's output in the float model, without the bias. None if the references are
            inputs.
        inputs_last: Whether all inputs stay unchanged until `flush`.

    Attributes:
        is_of_outputs: Whether the references are outputs of the layer.
        tokens: Number of tokens so far, including held-out tokens. Before `complete`, it is the number of
            tokens of this rank. After it, it is the number of tokens of all ranks.
        statistics: Statistics by class. Empty before `complete`.
        held_out: The held-out tokens. None before `complete`, and also None if there are too few tokens.
        samples: Samples of the first tokens of this rank. The keys are the names of the plugins that took
            them.
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
        """Lower bound of the number of floating-point operations of the statistics, on all ranks. It is 0
        before `complete`.
        """
        return sum(statistic.flops for statistic in self.statistics.values())

    def flush(self) -> None:
        """Compute the sums whose computation the statistics have postponed."""
        for statistic in self.statistics.values():
            statistic.flush()

    def take(self, x: Tensor, quantizer: QuantizerModule | None, reference: Tensor | None, forward: Forward, position: int) -> int:
        """Process the tokens of the layers' input in one forward pass, and return their number.

        Args:
            x: The float input.
            quantizer: Quantizer of the input, or None if the statistics use the float input.
            reference: The layer's input or output in the float model. None if it is unknown. A reference is
                ignored if its tokens are not the tokens of ``x``.
            forward: The forward pass that has computed the input.
            position: As in `update`.
        """
        x = x.detach()  # the input may be a parameter: some models project their table of positions
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
            call: Number of the call. Calls must be processed in ascending order.
            position: Number of tokens in earlier calls of all ranks. An approximate number is enough. It
                decides which tokens are held out, because the first tokens of all calls are held out.
        """
        self.tokens += x.shape[0]
        held = max(0, self._number_held_out - position)
        if held:
            self._held_out.append((x[:held], None if reference is None else reference[:held]))
            if self._is_apart:
                x, reference = x[held:], None if reference is None else reference[held:]
        self._sums.update(x, reference, call)

    def complete(self) -> None:
        """Merge the statistics and the held-out tokens of all ranks.

        Every rank must call this method, once, after its last update.
        """
        ranks = self._grid.ranks
        self.tokens = ranks.sum(self.tokens)
        self.statistics = self._sums.of_all_ranks()
        held_out = [pair for pairs in ranks.gather(self._held_out) for pair in pairs]
        if sum(len(x) for x, _ in held_out) >= FEWEST_TOKENS:
            references = [reference for _, reference in held_out if reference is not None]
            complete = len(references) == len(held_out)
            known = {"float_outputs" if self.is_of_outputs else "reference": torch.cat(references)} if complete else {}
            self.held_out = HeldOut(torch.cat([x for x, _ in held_out]), **known)
