"""Functions that learn the codebook of a weight by k-means on the vectors of the weight.

The error of each element is multiplied by the importance of the element. The only loop is over the iterations
of k-means. Each iteration is a few operations on all vectors.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["FAR", "SAMPLE", "STEPS", "learned", "nearest"]

SAMPLE = 1 << 15
"""Largest number of vectors from which a codebook is learned."""
STEPS = 16
"""Number of iterations of k-means."""
PIECE = 1 << 20
"""Number of distances that are computed at a time. They fit into a second-level cache."""
FAR = 2.0**40
"""Magnitude to which scaled values are clamped, so that products stay finite.

It is far beyond all entries.
"""
_LEAST = 1e-4
"""Lowest importance of an element, as a fraction of the mean.

Channels that are always 0 have this importance.
"""


def nearest(vectors: Tensor, entries: Tensor) -> Tensor:
    """Return the index of the nearest entry for each vector, as an int64 tensor ``[n]``.

    The shape of ``vectors`` is ``[n, d]``. The shape of ``entries`` is ``[K, d]``.
    """
    offset = entries.square().sum(1).mul_(-0.5)
    pieces = vectors.split(max(1, PIECE // len(entries)) if vectors.device.type == "cpu" else max(1, len(vectors)))
    return torch.cat([torch.addmm(offset, piece, entries.t()).argmax(1) for piece in pieces])


def learned(vectors: Tensor, importance: Tensor, count: int) -> Tensor:
    """Return a codebook with ``count`` entries for ``vectors``, as a float32 tensor ``[count, d]``.

    One entry is 0.

    The same arguments give the same entries. An element is ignored if its value or its importance is not
    finite.

    Args:
        vectors: The n vectors of a weight, as a float32 tensor ``[n, d]``.
        importance: A tensor ``[n, d]`` with a factor, at least 0, for the squared error of each element.
        count: Number of entries.
    """
    chosen = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(0))[:SAMPLE].to(vectors.device)
    x, weight = vectors[chosen], importance[chosen]
    least = torch.finfo(torch.float32).tiny
    counts = x.isfinite() & weight.isfinite()
    weight = torch.where(counts, weight, 0)
    weight = torch.where(counts, (weight / weight.mean().clamp(min=least)).clamp_(min=_LEAST), 0)
    x = torch.nan_to_num(x, 0.0, FAR, -FAR).clamp_(-FAR, FAR)
    numbers = torch.arange(count, device=x.device) % len(x)
    entries = x[numbers].clone()
    for _ in range(STEPS):
        labels = nearest(x, entries)
        total = torch.zeros_like(entries).index_add_(0, labels, weight)
        sums = torch.zeros_like(entries).index_add_(0, labels, weight * x)
        # An entry without vectors becomes the vector that is farthest from its entry.
        error = (x - entries[labels]).square_().mul_(weight).sum(1)
        farthest = x[error.topk(min(count, len(x))).indices]
        is_empty = total[:, :1] == 0
        place = (is_empty.cumsum(0) - 1).clamp_(min=0).squeeze(1) % len(x)
        entries = torch.where(is_empty, farthest[place], sums / total.clamp(min=least))
        entries[entries.square().sum(1).argmin()] = 0  # pruned weights stay 0
    return entries
