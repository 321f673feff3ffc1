"""Fit the scales to the codes: with codes fixed, the squared error of a row's outputs is a quadratic form of all the row's scales.

Its minimum is a small linear system for each row, one unknown a group. Groups must be solved for together: where inputs are correlated,
scales that are each the best for the others as they were can leave the row many times worse. Source: spec of the algorithms, §1.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["LARGEST", "PIECE", "RIDGE", "SMALLEST", "refit"]

PIECE = 1 << 22
"""Elements of the largest temporary; rows are independent, and are solved so many at a time."""
RIDGE = 1e-6
"""Of a row's mean diagonal, added to it: groups whose codes are nearly collinear in H share the change."""
LARGEST, SMALLEST = 2.0, 0.5
"""No scale changes by more; a row that asks for more goes in that direction as far as that."""


def refit(q: Tensor, e: Tensor, h: Tensor, group: int) -> Tensor:
    """Return by what to multiply the scale of each group of each row, so that ``e h eᵀ`` is smallest with the codes as they are.

    The objective never grows. Scales, or the ranges they come from, are to be multiplied by it and stored as their format has them, and the
    weight rounded anew; zero points stay. Powers of two have nothing between them, and are better searched.

    Args:
        q: Qᵀ ``[K, N]``, values, the channels in their own order; K is a multiple of ``group``.
        e: Eᵀ = Wᵀ − Qᵀ, likewise.
        h: ``H + λ I [K, K]``, likewise.
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
    # Along the way to its minimum a parabola falls, so that stopping short still gains.
    excess = torch.maximum(steps.amax(1) / (LARGEST - 1), steps.amin(1) / (SMALLEST - 1)).clamp_(min=1)
    return steps.div_(excess.unsqueeze(1)).t()
