"""Correct a weight for the error of its inputs before it is rounded: what GPTAQ and Qronos add to GPTQ.

The weight that makes up best for ``X̃`` in place of ``X`` is the minimum of ``‖W X − V X̃‖² + λ ‖W − V‖²`` over V, which is
``V = W + W D (H + λ I)⁻¹``; any rounding of W for this objective is a rounding of V for plain ‖(V − Q) X̃‖². Of that step a share α is
taken: 0 is GPTQ, and 1 is Qronos but for the first column. Source: spec of the algorithms, §0.1 and §1.3–1.4.

GPTAQ as published lets each column make up only for what columns before it have left, which is another matrix, `causal_matrix`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quark_algos.gptq.damping import Factor

__all__ = ["causal_matrix", "corrected", "correction", "share_for"]


def causal_matrix(d: Tensor, factor: Factor, alpha: float) -> Tensor:
    """GPTAQ's ``P = α ((D Uᵀ) ⊙ strictly upper) U [K, K]``, ``UᵀU = (H + λ I)⁻¹``; source: arXiv 2504.02692, algorithm 1.

    Args:
        d: D ``[K, K]``, its channels in the order of the factor.
        factor: Of H.
        alpha: α.
    """
    r = factor.a * factor.pivots.sqrt()  # U⁻¹
    mixed = torch.linalg.solve_triangular(r.t(), d, upper=False, left=False)  # D Uᵀ
    return torch.linalg.solve_triangular(r, mixed.triu_(1), upper=True, left=False).mul_(alpha)


def share_for(wt: Tensor, step: Tensor, x: Tensor, reference: Tensor, most: float) -> float:
    """Return the share α of a correction that does best on some tokens, from 0 to ``most``.

    ``‖W x − (W + α S) x̃‖²`` is a parabola in α.

    Args:
        wt: Wᵀ ``[K, N]``.
        step: Sᵀ ``[K, N]``, the correction in full.
        x: x̃, what the layer gets, ``[n, K]``; of tokens that S was not made from.
        reference: x, what it would get in the float model, likewise.
        most: The largest share.
    """
    wanted, made = (reference - x) @ wt, x @ step  # [n, N]
    size = float(made.square().sum())
    return min(max(float((wanted * made).sum()) / size, 0.0), most) if size > 0 else most


def corrected(wt: Tensor, d: Tensor, factor: Factor, alpha: float) -> Tensor:
    """``Wᵀ + α (H + λ I)⁻¹ Dᵀ Wᵀ``; arguments as of `correction`."""
    return wt + correction(wt, d, factor).mul_(alpha)


def correction(wt: Tensor, d: Tensor, factor: Factor) -> Tensor:
    """``(H + λ I)⁻¹ Dᵀ Wᵀ [K, N]``: the correction in full.

    Args:
        wt: Wᵀ ``[K, N]``.
        d: D ``[K, K]``.
        factor: Of H, in the channels' own order; its damping says how far the correction may go.
    """
    step = torch.mm(d.t(), wt)  # [K, N]
    # H + λ I = R Rᵀ, R = A · diag(√d): two triangular solves.
    r = factor.a * factor.pivots.sqrt()
    step = torch.linalg.solve_triangular(r, step, upper=True)
    return torch.linalg.solve_triangular(r.t(), step, upper=False)
