"""Collector: the statistics of the input of one input group, and a few of its tokens to validate codes on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quark.algorithms import HeldOut, Statistic
from quark.calibration.figures import InputSample
from quark.calibration.held_out import FEWEST_TOKENS, TOKENS_PER_CHANNEL, held_out_tokens

__all__ = ["Collector"]

_TOKENS_SHOWN = 128
"""Tokens of the sample for the report: those of the beginning of a text, where activations are largest."""


class Collector:
    """Statistics of one input, and some of its tokens; where these are few for the number of channels, they are in no statistic.

    Args:
        kinds: Of the statistics.
        columns: K, the number of input channels.
        device: Where the inputs lie.
        tokens: How many tokens there will be, or about so many.

    Attributes:
        statistics: By class; of all tokens, or of all that are not held out.
        tokens: How many were seen, held out or not.
        sample: Some values of the input, for the report; None until `show`.
    """

    def __init__(self, kinds: Sequence[type[Statistic]], columns: int, device: torch.device, tokens: int) -> None:
        self.statistics: dict[type[Statistic], Statistic] = {kind: kind(columns, device) for kind in kinds}
        self.tokens = 0
        self.sample: InputSample | None = None
        self._held_out = held_out_tokens(tokens)
        self._is_apart = tokens < TOKENS_PER_CHANNEL * columns
        self._inputs: list[Tensor] = []
        self._references: list[Tensor | None] = []

    @property
    def flops(self) -> int:
        """Floating-point operations that the statistics take at least."""
        return sum(statistic.flops for statistic in self.statistics.values())

    def flush(self) -> None:
        """Compute what the statistics have put off."""
        for statistic in self.statistics.values():
            statistic.flush()

    def show(self, x: Tensor, rounded: Tensor | None) -> None:
        """Take a sample of the input for the report, once: ``x [n, K]`` in float, and as the layers read it, or None."""
        if self.sample is None and len(x):
            self.sample = InputSample.of(x[:_TOKENS_SHOWN], None if rounded is None else rounded[:_TOKENS_SHOWN])

    def update(self, x: Tensor, reference: Tensor | None = None) -> None:
        """Take in some tokens; arguments as of `Statistic.update`."""
        held = max(0, self._held_out - self.tokens)
        self.tokens += x.shape[0]
        if held:
            self._inputs.append(x[:held])
            self._references.append(None if reference is None else reference[:held])
            if self._is_apart:
                x, reference = x[held:], None if reference is None else reference[held:]
        for statistic in self.statistics.values():
            statistic.update(x, reference)

    def held_out(self) -> HeldOut | None:
        """Return the tokens to validate on; None where they are too few."""
        if sum(len(x) for x in self._inputs) < FEWEST_TOKENS:
            return None
        references = [r for r in self._references if r is not None]
        complete = len(references) == len(self._references)
        return HeldOut(torch.cat(self._inputs), torch.cat(references) if complete else None)
