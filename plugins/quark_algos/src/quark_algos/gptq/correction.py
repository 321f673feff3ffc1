"""Correction of a weight for the error of its inputs, before it is rounded: GPTAQ and Qronos add it to GPTQ.

The weight that best compensates for the input ``X̃`` instead of ``X`` is the minimum of
``‖W X − V X̃‖² + λ ‖W − V‖²`` over V, which is ``V = W + W D (H + λ I)⁻¹``; rounding W for this objective is
the same as rounding V for plain ‖(V − Q) X̃‖². α is the strength of that step: 0 is GPTQ, and 1 is Qronos
except for its first column. Source: arXiv 2504.02692 (GPTAQ), arXiv 2505.11695 (Qronos). GPTAQ as published
corrects each column only for the errors of the columns before it, by another matrix, `causal_matrix`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quark.algorithms import CrossMoment, HeldOut, Hessian, OutputMoment, RoundingTask
from quark.base.scalars import numbers
from quark_algos.gptq.config import Recipe
from quark_algos.gptq.damping import Factor

__all__ = ["ErrorMoment", "causal_matrix", "corrected", "correction", "share_for", "solved"]


class ErrorMoment(CrossMoment):
    """D; or, for a layer with few outputs, the smaller sum ``W (D + H)`` from `OutputMoment`."""

    of_outputs = OutputMoment


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


def share_for(wt: Tensor, step: Tensor, held_out: HeldOut, most: float) -> float:
    """Return the strength α of a correction, 0 to ``most``.

    It minimizes ``‖W x − (W + α S) x̃‖²``, a parabola in α, on held-out tokens. If there are many outputs, it
    compares about half as many as there are inputs.

    Args:
        wt: Wᵀ ``[K, N]``.
        step: Sᵀ ``[K, N]``, the correction in full.
        held_out: Tokens of both models that S does not depend on.
        most: The largest strength.
    """
    if wt.shape[1] > wt.shape[0]:
        every = -(-2 * wt.shape[1] // wt.shape[0]) | 1
        wt, step = wt[:, ::every], step[:, ::every]
    x = held_out.x.float()
    error, change = torch.addmm(held_out.outputs(wt.t()), x, wt, alpha=-1), x @ step  # [n, N]
    size, common = numbers(change.square().sum(), (error * change).sum())
    return min(max(common / size, 0.0), most) if size > 0 else most


def correction(wt: Tensor, d: Tensor, factor: Factor, perm: Tensor | None = None) -> Tensor:
    """Return the full correction ``(H + λ I)⁻¹ Dᵀ Wᵀ [K, N]``.

    Args:
        wt: Wᵀ ``[K, N]``.
        d: D ``[K, K]``.
        factor: Factor of the damped H; the damping limits the correction.
        perm: Order of the channels in the factor ``[K]``; None for the original order.
    """
    if wt.shape[1] > wt.shape[0]:  # K systems of equations instead of N
        return torch.mm(solved(d.t(), factor, perm), wt)
    return solved(torch.mm(d.t(), wt), factor, perm)


def solved(b: Tensor, factor: Factor, perm: Tensor | None = None) -> Tensor:
    """Return ``(H + λ I)⁻¹ b``, ``[K, n]``: ``A · diag(d) · Aᵀ x = b`` by two triangular systems."""
    x = torch.linalg.solve_triangular(factor.a, b if perm is None else b.index_select(0, perm), upper=True, unitriangular=True)
    x = torch.linalg.solve_triangular(factor.a.t(), x.div_(factor.pivots[:, None]), upper=False, unitriangular=True)
    return x if perm is None else torch.empty_like(x).index_copy_(0, perm, x)


def corrected(
    wt: Tensor, task: RoundingTask, hessian: Hessian, recipe: Recipe, factor: Factor, perm: Tensor | None
) -> tuple[Tensor, Tensor | None, float]:
    """Return the corrected weight, the causal matrix, and the strength of the correction.

    The causal matrix is GPTAQ's P, if the correction is causal.

    Args:
        wt: Wᵀ ``[K, N]``, which is changed in place.
        task: The task, with the moments of the input errors and held-out tokens.
        hessian: Hessian of the inputs.
        recipe: The recipe, which selects the correction.
        factor: Factor of the damped H, in the order ``perm``.
        perm: A permutation of the channels; None for their own order.
    """
    if recipe.is_causal:
        d = task.statistic(CrossMoment).matrix()
        if perm is not None:
            d = d.index_select(0, perm).index_select(1, perm)
        return wt, causal_matrix(d, factor, recipe.share), recipe.share
    if OutputMoment in task.statistics:  # W (D + H), from which W H is subtracted to get W D
        of_errors = torch.addmm(task.statistic(OutputMoment).matrix().t(), hessian.matrix(), wt, beta=1, alpha=-1)
        step = solved(of_errors, factor, perm)
    else:
        step = correction(wt, task.statistic(ErrorMoment).matrix(), factor, perm)
    share, held_out = recipe.share, task.held_out
    if recipe.is_careful and held_out is not None and (held_out.reference is not None or held_out.float_outputs is not None):
        share = share_for(wt, step, held_out, share)
    elif recipe.is_careful and hessian.tokens < wt.shape[0]:
        share = 0.0  # without held-out tokens and with few others, nothing shows that the correction helps
    return wt.add_(step, alpha=share), None, share
