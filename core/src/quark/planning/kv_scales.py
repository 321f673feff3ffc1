"""Scales of the key-value cache: which projections share one, and which one that is. For calibration and for exporters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from quark.planning.precedence import first_match


def cache_groups(names: Iterable[str], patterns: Sequence[str], *, separate: bool = False) -> list[tuple[str, ...]]:
    """Returns the layers that feed the cache, those that share a scale together: keys and values of one attention.

    Args:
        names: Full names of layers with one static scale for their output.
        patterns: Of those that feed the cache.
        separate: Whether each keeps a scale of its own.
    """
    found: dict[str, list[str]] = {}
    for name in names:
        if first_match(name, patterns) is not None:
            found.setdefault(name if separate else name.rpartition(".")[0], []).append(name)
    return [tuple(members) for members in found.values()]


def shared_cache_scale(scales: Sequence[Tensor], floor: float) -> Tensor:
    """Returns the largest of some scales ``[]``, not below ``floor``; ``[]``."""
    return torch.stack([scale.reshape(()) for scale in scales]).amax().clamp(min=floor)
