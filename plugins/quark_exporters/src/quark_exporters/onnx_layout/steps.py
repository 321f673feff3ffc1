"""Step functions: functions of one number with few values, as a lookup table for a graph.

Examples are rounding to a small format and the choice of a block's power of two. The tables come from the
format itself, so a graph computes the same as any plugin's format.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor

__all__ = ["Steps", "steps_of"]

_LARGEST = 0x7F7FFFFF
"""Bits of the largest float32 number."""
_EXPONENTS = torch.arange(0, 255, dtype=torch.int64) << 23
_MOST = 1 << 10
"""A function with more steps counts as continuous."""


@attrs.frozen(eq=False)
class Steps:
    """A step function.

    Attributes:
        thresholds: Inputs at which the function changes, ascending: float32 ``[N − 1]``.
        values: Its values: float32 ``[N]``; the first value applies below the first threshold.
    """

    thresholds: Tensor
    values: Tensor

    def equals(self, other: Steps) -> bool:
        """Return whether both functions are equal."""
        return torch.equal(self.thresholds, other.thresholds) and torch.equal(self.values, other.values)


def steps_of(function: Callable[[Tensor], Tensor], *, signed: bool) -> Steps | None:
    """Return the table of an elementwise function of float32 numbers; None if it has too many steps.

    Assumes monotone functions: within a power of two, equal values at both ends mean a constant.

    Args:
        function: Takes and returns float32 ``[n]``.
        signed: Whether negative numbers are in its domain.
    """
    keys = torch.cat([_EXPONENTS, torch.tensor([_LARGEST])])
    if signed:
        keys = torch.cat([-keys.flip(0)[:-1], keys])

    def at(places: Tensor) -> Tensor:
        return function(_number(places))

    values = at(keys)
    low, high, at_low, at_high = keys[:-1], keys[1:], values[:-1], values[1:]
    first, found, found_values = values[:1], [], []
    while True:
        differ = at_low != at_high
        low, high, at_low, at_high = low[differ], high[differ], at_low[differ], at_high[differ]
        adjacent = high - low == 1
        found.append(high[adjacent])
        found_values.append(at_high[adjacent])
        low, high, at_low, at_high = low[~adjacent], high[~adjacent], at_low[~adjacent], at_high[~adjacent]
        if len(low) == 0:
            break
        if len(low) + sum(map(len, found)) > _MOST:
            return None
        middle = (low + high) // 2
        at_middle = at(middle)
        low, high = torch.cat([low, middle]), torch.cat([middle, high])
        at_low, at_high = torch.cat([at_low, at_middle]), torch.cat([at_middle, at_high])
    places = torch.cat(found)
    order = places.argsort()
    return Steps(_number(places[order]), torch.cat([first, torch.cat(found_values)[order]]))


def _number(places: Tensor) -> Tensor:
    """Return the float32 numbers at integer positions in ascending order; position 0 is the number 0."""
    magnitudes = places.abs().to(torch.int32).view(torch.float32)
    return torch.where(places < 0, -magnitudes, magnitudes)
