"""Fit the scales to the codes: with codes fixed, the squared error of a row's outputs is a quadratic form of all the row's scales.

Its minimum is a small linear system per row, with one unknown per group. Groups must be solved for together:
with correlated inputs, scales that are each optimal with the others fixed can make the error of the row many
times larger. The error is that of arXiv 2210.17323, eq. 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["LARGEST", "PIECE", "RIDGE", "SMALLEST", "refit"]

PIECE = 1 << 22
"""Elements of the largest temporary; rows are independent, and are solved in pieces of this size."""
RIDGE = 1e-6
"""Share of a row's mean diagonal that is added to it, so that groups whose codes are nearly collinear in H
share the change.
"""
LARGEST, SMALLEST = 2.0, 0.5
"""Bounds of the factors; a step beyond them is shortened, in its direction, until all factors of the row are
within them.
"""


def refit(q: Tensor, e: Tensor, h: Tensor, group: int) -> Tensor:
    """Return factors for the scale of each group of each row that minimize ``e h eᵀ`` with fixed codes.

    The objective never grows. The caller multiplies the scales, or the ranges they come from, rounds them to
    their format, and rounds the weight again; zero points stay. For scales that are powers of two a search is
    better: there is nothing between two of them.

    Args:
        q: Qᵀ ``[K, N]``, dequantized values, channels in their own order; K is a multiple of ``group``.
        e: Eᵀ = Wᵀ − Qᵀ ``[K, N]``, channels in their own order.
        h: ``H + λ I [K, K]``, channels in their own order.
        group: Channels that share a scale.

    Returns:
        Factors ``[K / group, N]``, from 1/2 to 2; 1 where all codes of a group are 0.
    """
    pull = q.mul(h @ e).view(-1, group, q.shape[1]).sum(1)  # [m, N], half the gradient by each factor, negated
    rows = max(1, PIECE // (pull.shape[0] * q.shape[0]))
    columns = h.view(q.shape[0], -1, group).permute(1, 0, 2)  # [m, K, g]
    parts = [_steps(a, b, columns) for a, b in zip(q.split(rows, 1), pull.split(rows, 1), strict=True)]
    return torch.cat(parts, 1).add_(1)


def _steps(q: Tensor, pull: Tensor, columns: Tensor) -> Tensor:
    """Return the changes of the factors of n rows, ``[m, n]``: ``q [K, n]``, ``pull [m, n]``, H by groups of columns ``[m, K, g]``."""
    m, _, group = columns.shape
    groups = q.view(m, group, -1)
    moved = torch.bmm(columns, groups).view(m, m, group, -1)  # by a factor of group a, in group b
    curvature = moved.mul_(groups).sum(2).permute(2, 0, 1)  # [n, m, m]
    diagonal = curvature.diagonal(dim1=1, dim2=2)
    diagonal.add_(torch.where(diagonal > 0, RIDGE * diagonal.mean(1, keepdim=True), 1.0))
    lower, failed = torch.linalg.cholesky_ex(curvature)
    steps = torch.cholesky_solve(pull.t().unsqueeze(2), lower).squeeze(2)  # [n, m]
    steps = torch.where(failed.unsqueeze(1) == 0, steps, 0.0)
    # A parabola falls along the whole way to its minimum, so that a shortened step still reduces the error.
    excess = torch.maximum(steps.amax(1) / (LARGEST - 1), steps.amin(1) / (SMALLEST - 1)).clamp_(min=1)
    return steps.div_(excess.unsqueeze(1)).t()
