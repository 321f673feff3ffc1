"""The correction that GPTAQ and Qronos add to GPTQ. It changes a weight to compensate the error of the
layer's inputs.

A layer gets the input ``X̃`` instead of ``X``. The best weight for the input X̃ is the V that minimizes ``‖W
X − V X̃‖² + λ ‖W − V‖²``. It is ``V = W + W D (H + λ I)⁻¹``. So the correction replaces W by V, and V is then
rounded as in GPTQ. α is the strength of the correction. With α = 0, the algorithm is GPTQ. With α = 1, it is
Qronos, which differs only in the first column. Sources: arXiv 2504.02692 (GPTAQ), arXiv 2505.11695 (Qronos).
GPTAQ as published is different: it corrects each column only for the input errors of earlier columns, and
uses the matrix that `causal_matrix` returns.
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
    """The statistic D. For a layer with few outputs, `OutputMoment` replaces this statistic. It accumulates
    ``W (D + H)``, which is a smaller matrix.
    """

    of_outputs = OutputMoment


def causal_matrix(d: Tensor, factor: Factor, alpha: float) -> Tensor:
    """Return GPTAQ's matrix ``P = α triu(D Uᵀ, 1) U``, ``[K, K]``, with ``UᵀU = (H + λ I)⁻¹``.

    ``triu(M, 1)`` is the strictly upper triangle of M. Source: arXiv 2504.02692, algorithm 1.

    Args:
        d: D ``[K, K]``. Its channels must be in the order of the factor.
        factor: The factor of the damped H.
        alpha: The strength α of the correction.
    """
    r = factor.a * factor.pivots.sqrt()  # U⁻¹
    mixed = torch.linalg.solve_triangular(r.t(), d, upper=False, left=False)  # D Uᵀ
    return torch.linalg.solve_triangular(r, mixed.triu_(1), upper=True, left=False).mul_(alpha)


def share_for(wt: Tensor, step: Tensor, held_out: HeldOut, most: float) -> float:
    """Return the strength α of a correction that gives the smallest error on held-out tokens. α is from 0 to
    ``most``.

    α minimizes ``‖W x − (W + α S) x̃‖²``, which is a parabola in α. If there are more outputs than inputs,
    the error is computed for some outputs only: for about half as many outputs as there are inputs.

    Args:
        wt: Wᵀ ``[K, N]``.
        step: Sᵀ ``[K, N]``, the full correction.
        held_out: The inputs x and x̃ of held-out tokens, from the float model and from the quantized model. S
            must not depend on these tokens.
        most: The largest allowed strength.
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
        factor: The factor of the damped H. The damping limits the correction.
        perm: The order of the channels in the factor, ``[K]``. If it is None, the channels are in the
            original order.
    """
    if wt.shape[1] > wt.shape[0]:  # K systems of equations instead of N
        return torch.mm(solved(d.t(), factor, perm), wt)
    return solved(torch.mm(d.t(), wt), factor, perm)


def solved(b: Tensor, factor: Factor, perm: Tensor | None = None) -> Tensor:
    """Return ``(H + λ I)⁻¹ b``, ``[K, n]``.

    The function solves ``A · diag(d) · Aᵀ x = b`` as two triangular systems. ``factor`` has A and d.
    """
    x = torch.linalg.solve_triangular(factor.a, b if perm is None else b.index_select(0, perm), upper=True, unitriangular=True)
    x = torch.linalg.solve_triangular(factor.a.t(), x.div_(factor.pivots[:, None]), upper=False, unitriangular=True)
    return x if perm is None else torch.empty_like(x).index_copy_(0, perm, x)


def corrected(
    wt: Tensor, task: RoundingTask, hessian: Hessian, recipe: Recipe, factor: Factor, perm: Tensor | None
) -> tuple[Tensor, Tensor | None, float]:
    """Return the corrected weight, GPTAQ's causal matrix, and the strength of the correction.

    If the recipe is causal, the weight is not changed, because the causal matrix corrects it later. If it is
    not causal, the matrix is None.

    Args:
        wt: Wᵀ ``[K, N]``. It is changed in place.
        task: The task. It must have statistics of the input errors, and held-out tokens.
        hessian: The Hessian of the inputs.
        recipe: The recipe. It selects the kind of correction.
        factor: The factor of the damped H, with the channels in the order ``perm``.
        perm: A permutation of the channels. If it is None, the channels are in the original order.
    """
    if recipe.is_causal:
        d = task.statistic(CrossMoment).matrix()
        if perm is not None:
            d = d.index_select(0, perm).index_select(1, perm)
        return wt, causal_matrix(d, factor, recipe.share), recipe.share
    if OutputMoment in task.statistics:  # the statistic is W (D + H), so W H is subtracted to get W D
        of_errors = torch.addmm(task.statistic(OutputMoment).matrix().t(), hessian.matrix(), wt, beta=1, alpha=-1)
        step = solved(of_errors, factor, perm)
    else:
        step = correction(wt, task.statistic(ErrorMoment).matrix(), factor, perm)
    share, held_out = recipe.share, task.held_out
    if recipe.is_careful and held_out is not None and (held_out.reference is not None or held_out.float_outputs is not None):
        share = share_for(wt, step, held_out, share)
    elif recipe.is_careful and hessian.tokens < wt.shape[0]:
        share = 0.0  # with few tokens, and none held out, nothing shows that the correction helps
    return wt.add_(step, alpha=share), None, share
