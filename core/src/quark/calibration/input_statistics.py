"""Collect the statistics of the input that some layers share, and keep a few of its tokens, to validate codes on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quark.algorithms import HeldOut, Statistic

SHARE = 16
"""One token in so many is held out: what that takes from the statistics is less than their noise."""
MOST = 128
"""More tokens are not held out: a comparison of two roundings on the same tokens needs no more, and costs little."""
LEAST = 4
"""Fewer would say nothing, and are not held out."""
MANY = 2
"""Of so many tokens for each channel, none is kept out of the statistics: codes are hardly fitted to single tokens then, and the few that
are kept to validate on are a small share. On SmolLM2, 128 of 2,048 tokens left out cost more than validating on them could win."""


def held_out_tokens(tokens: int) -> int:
    """Return how many of that many tokens are held out: the first ones.

    They are the beginning of a sequence, since that is where many models have a token of enormous activations, to which all others attend:
    tokens from the middle of sequences say nothing of it, while the statistics, and what is rounded by them, go by it above all. And
    neighbours of a held-out token, which are like it, are held out with it. Experts get tokens and no sequences; theirs are held out alike.
    """
    found = min(MOST, tokens // SHARE)
    return found if found >= LEAST else 0


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
    """

    def __init__(self, kinds: Sequence[type[Statistic]], columns: int, device: torch.device, tokens: int) -> None:
        self.statistics: dict[type[Statistic], Statistic] = {kind: kind(columns, device) for kind in kinds}
        self.tokens = 0
        self._held_out = held_out_tokens(tokens)
        self._is_apart = tokens < MANY * columns
        self._inputs: list[Tensor] = []
        self._references: list[Tensor | None] = []

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
        if sum(len(x) for x in self._inputs) < LEAST:
            return None
        references = [r for r in self._references if r is not None]
        complete = len(references) == len(self._references)
        return HeldOut(torch.cat(self._inputs), torch.cat(references) if complete else None)
