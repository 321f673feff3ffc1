"""Corrections around the rounding: of a weight for the error of its inputs before, of its scales after.

The first is what GPTAQ and Qronos add to GPTQ. The weight that compensates best for ``X̃`` in place of ``X``
is the minimum of ``‖W X − V X̃‖² + λ ‖W − V‖²`` over V, which is ``V = W + W D (H + λ I)⁻¹``; any rounding of
W for this objective is a rounding of V for plain ‖(V − Q) X̃‖². α is the strength of that step: 0 is GPTQ,
and 1 is Qronos except for its first column. Source: arXiv 2504.02692 (GPTAQ), arXiv 2505.11695 (Qronos).
GPTAQ as published corrects each column only for the errors of the columns before it, by another matrix,
`causal_matrix`.

The second, `refit`, fits the scales to the codes: with codes fixed, the squared error of a row's outputs
(arXiv 2210.17323, eq. 1) is a quadratic form of all the row's scales. Its minimum is a small linear system
per row, with one unknown per group. Groups must be solved for together: with correlated inputs, scales that
are each optimal with the others fixed can make the error of the row many times larger.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quark.base.from_device import numbers
from quark_algos.gptq.damping import Factor

__all__ = ["LARGEST", "PIECE", "RIDGE", "SMALLEST", "causal_matrix", "corrected", "correction", "refit", "share_for"]


def causal_matrix(d: Tensor, factor: Factor, alpha: float) -> Tensor:
    """Return GPTAQ's ``P = α ((D Uᵀ) ⊙ strictly upper) U [K, K]``, ``UᵀU = (H + λ I)⁻¹``.

    Source: arXiv 2504.02692, algorithm 1.

    Args:
        d: D ``[K, K]``, channels in the order of the factor.
        factor: Factor of the damped H.
        alpha: Strength of the correction, α.
    """
    r = factor.a * factor.pivots.sqrt()  # U⁻¹
    mixed = torch.linalg.solve_triangular(r.t(), d, upper=False, left=False)  # D Uᵀ
    return torch.linalg.solve_triangular(r, mixed.triu_(1), upper=True, left=False).mul_(alpha)


def share_for(wt: Tensor, step: Tensor, x: Tensor, reference: Tensor, most: float) -> float:
    """Return the strength α of a correction, 0 to ``most``.

    It minimizes ``‖W x − (W + α S) x̃‖²``, a parabola in α, on held-out tokens.

    Args:
        wt: Wᵀ ``[K, N]``.
        step: Sᵀ ``[K, N]``, the correction in full.
        x: x̃ ``[n, K]``, inputs of the layer in the quantized model, of tokens that S does not depend on.
        reference: x ``[n, K]``, inputs of the layer in the float model, of the same tokens.
        most: The largest strength.
    """
    error, change = (reference - x) @ wt, x @ step  # [n, N]
    size, common = numbers(change.square().sum(), (error * change).sum())
    return min(max(common / size, 0.0), most) if size > 0 else most


def corrected(wt: Tensor, d: Tensor, factor: Factor, alpha: float) -> Tensor:
    """Return the corrected weight ``Wᵀ + α (H + λ I)⁻¹ Dᵀ Wᵀ``; for the arguments see `correction`."""
    return wt + correction(wt, d, factor).mul_(alpha)


def correction(wt: Tensor, d: Tensor, factor: Factor) -> Tensor:
    """Return the full correction ``(H + λ I)⁻¹ Dᵀ Wᵀ [K, N]``.

    Args:
        wt: Wᵀ ``[K, N]``.
        d: D ``[K, K]``.
        factor: Factor of the damped H, channels in their own order; its damping limits the correction.
    """
    step = torch.mm(d.t(), wt)  # [K, N]
    # H + λ I = R Rᵀ, R = A · diag(√d): two triangular solves.
    r = factor.a * factor.pivots.sqrt()
    step = torch.linalg.solve_triangular(r, step, upper=True)
    return torch.linalg.solve_triangular(r.t(), step, upper=False)


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
    """Return the changes of the factors of n rows, ``[m, n]``.

    From ``q [K, n]``, ``pull [m, n]`` and H by groups of columns, ``[m, K, g]``.
    """
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
