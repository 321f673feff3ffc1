"""Channels: how the channels that are divided at a site correspond to the input columns of what reads them."""

from __future__ import annotations

from typing import Literal

import attrs
from torch import Tensor

__all__ = ["Channels"]


@attrs.frozen
class Channels:
    """One column for each channel, or, with grouped-query attention, several: some query heads share the values of one key-value head.

    Attributes:
        count: Channels that are divided, C.
        repeats: Query heads to each key-value head; 1 elsewhere.
        size: Channels of one head; it counts only where ``repeats`` is not 1.
    """

    count: int
    repeats: int = 1
    size: int = 1

    @property
    def columns(self) -> int:
        """Input columns of the balance layers, K."""
        return self.count * self.repeats

    def expand_scale(self, s: Tensor) -> Tensor:
        """Of ``[…, C]``, one for each channel, what each column has, ``[…, K]``."""
        if self.repeats == 1:
            return s
        return s.unflatten(-1, (-1, self.size)).repeat_interleave(self.repeats, -2).flatten(-2)

    def reduced(self, x: Tensor, by: Literal["mean", "max"]) -> Tensor:
        """Of ``[…, K]``, one for each column, the mean or the largest of the columns of each channel, ``[…, C]``."""
        if self.repeats == 1:
            return x
        heads = x.unflatten(-1, (-1, self.repeats, self.size))
        return (heads.mean(-2) if by == "mean" else heads.amax(-2)).flatten(-2)
