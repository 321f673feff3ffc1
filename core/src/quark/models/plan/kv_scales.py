"""Scales of the KV cache: which layers share a scale, and the merged scale.

Calibration and exporters merge with these two functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from quark.models.plan.rules import first_match


def kv_scale_groups(names: Iterable[str], patterns: Sequence[str], *, separate: bool = False) -> list[tuple[str, ...]]:
    """Return the layers that feed the KV cache, in groups that share a scale.

    A group has the keys and values of one attention.

    Args:
        names: Full names of layers with one static scale for their output.
        patterns: Patterns of layers that feed the cache.
        separate: Whether each layer keeps its own scale.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        if first_match(name, patterns) is not None:
            groups.setdefault(name if separate else name.rpartition(".")[0], []).append(name)
    return [tuple(members) for members in groups.values()]


def merge_kv_scales(scales: Sequence[Tensor], floor: float) -> Tensor:
    """Return the largest of some scales ``[]``, but at least ``floor``; shape ``[]``."""
    return torch.stack([scale.reshape(()) for scale in scales]).amax().clamp(min=floor)
