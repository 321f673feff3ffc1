"""Lookup tables with which an ONNX graph computes step functions.

A step function maps a number to one of a few values.

Examples are the rounding to a small number format, and the choice of a power of two as the scale of a block.
quark builds each table from results of the number format, so this also works for number formats of plugins.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor

__all__ = ["Steps", "steps_of"]

_LARGEST = 0x7F7FFFFF
"""The bit pattern of the largest finite float32 number."""
_EXPONENTS = torch.arange(0, 255, dtype=torch.int64) << 23
_MOST = 1 << 10
"""`steps_of` builds no table for a function with more steps than this."""


@attrs.frozen(eq=False)
class Steps:
    """A step function.

    Attributes:
        thresholds: Inputs at which the value changes, in ascending order: float32 ``[N − 1]``.
        values: The values between the thresholds: float32 ``[N]``. Inputs below the first threshold have the
            first value.
    """

    thresholds: Tensor
    values: Tensor

    def equals(self, other: Steps) -> bool:
        """Return whether both functions have the same thresholds and values."""
        return torch.equal(self.thresholds, other.thresholds) and torch.equal(self.values, other.values)


def steps_of(function: Callable[[Tensor], Tensor], *, signed: bool) -> Steps | None:
    """Return the table of an elementwise function; None if the function has too many steps.

    The function must be monotone between two neighbouring powers of two. If the function has equal values at
    the two powers, `steps_of` assumes that the function is constant between them.

    Args:
        function: Maps a float32 tensor ``[n]`` to a float32 tensor ``[n]``.
        signed: Whether the table must also have entries for negative inputs.
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
    """Return the float32 number for each place.

    The place of a number is its index if all float32 numbers are sorted: the place 0 means the number 0, and
    the place 1 means the smallest positive number.
    """
    magnitudes = places.abs().to(torch.int32).view(torch.float32)
    return torch.where(places < 0, -magnitudes, magnitudes)
