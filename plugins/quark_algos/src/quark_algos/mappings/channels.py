"""Channels: how the output channels of a smooth layer correspond to the input channels of its balance layers."""

from __future__ import annotations

from typing import Literal

import attrs
from torch import Tensor

__all__ = ["Channels"]


@attrs.frozen
class Channels:
    """Maps the C output channels of a smooth layer to the K input channels of its balance layers.

    K = C, except for the values of grouped-query attention: each key-value head feeds several query heads, so
    that K = C · repeats.

    Attributes:
        count: Output channels of the smooth layer, C.
        repeats: Query heads per key-value head; 1 for all other mappings.
        size: Channels of one head; used only if ``repeats`` is not 1.
    """

    count: int
    repeats: int = 1
    size: int = 1

    @property
    def columns(self) -> int:
        """Number of input channels of the balance layers, K."""
        return self.count * self.repeats

    def expand_scale(self, s: Tensor) -> Tensor:
        """Expand per-channel values ``[…, C]`` to the input channels of the balance layers, ``[…, K]``; repeats KV heads under GQA."""
        if self.repeats == 1:
            return s
        return s.unflatten(-1, (-1, self.size)).repeat_interleave(self.repeats, -2).flatten(-2)

    def reduced(self, x: Tensor, by: Literal["mean", "max"]) -> Tensor:
        """Reduce values per input channel, ``[…, K]``, to values per output channel, ``[…, C]``: mean or maximum over repeated heads."""
        if self.repeats == 1:
            return x
        heads = x.unflatten(-1, (-1, self.repeats, self.size))
        return (heads.mean(-2) if by == "mean" else heads.amax(-2)).flatten(-2)
