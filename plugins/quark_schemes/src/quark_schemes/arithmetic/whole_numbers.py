"""Rounding to whole numbers, in place, by the round methods of AMD Quark's public API."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quark.config.enums import RoundType

__all__ = ["WHOLE_ROUNDINGS", "round_half_away"]


def round_half_away(t: Tensor) -> Tensor:
    """Round to whole numbers in place, halfway values away from zero."""
    down = t.trunc()
    return torch.where((t - down).abs_() >= 0.5, down + t.sign(), down, out=t)


WHOLE_ROUNDINGS: dict[RoundType, Callable[[Tensor], Tensor]] = {
    RoundType.half_even: torch.Tensor.round_,
    RoundType.floor: torch.Tensor.floor_,
    RoundType.round: round_half_away,
}
"""Rounds to whole numbers in place, by round method."""
