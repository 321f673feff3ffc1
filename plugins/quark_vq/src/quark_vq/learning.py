"""Learns the codebook of a weight by k-means of its vectors, weighted by the importance of each element.

The only loop is over iterations. Each iteration is a few operations on all vectors.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["FAR", "SAMPLE", "STEPS", "learned", "nearest"]

SAMPLE = 1 << 15
"""Largest number of vectors that a codebook is learned from."""
STEPS = 16
"""Iterations of k-means."""
PIECE = 1 << 20
"""Number of distances that are computed at a time; they fit a second-level cache."""
FAR = 2.0**40
"""Scaled values are clamped to this magnitude, far beyond all entries, so that products stay finite."""
_LEAST = 1e-4
"""Lowest importance of an element, as a share of the mean, for channels that are always 0."""


def nearest(vectors: Tensor, entries: Tensor) -> Tensor:
    """Return the number of the nearest of ``entries [K, d]`` for each of ``vectors [n, d]``, int64."""
    offset = entries.square().sum(1).mul_(-0.5)
    pieces = vectors.split(max(1, PIECE // len(entries)) if vectors.device.type == "cpu" else max(1, len(vectors)))
    return torch.cat([torch.addmm(offset, piece, entries.t()).argmax(1) for piece in pieces])


def learned(vectors: Tensor, importance: Tensor, count: int) -> Tensor:
    """Return ``count`` entries for vectors, ``[count, d]``, float32, one of them 0.

    The same arguments give the same entries. Elements that are not finite, or whose importance is not, are
    ignored.

    Args:
        vectors: ``[n, d]``, float32.
        importance: Factor of the squared error of each element, ``[n, d]``, at least 0.
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
        entries[entries.square().sum(1).argmin()] = 0  # weights that were pruned stay 0
    return entries
