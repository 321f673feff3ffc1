"""Correct a weight for the error of its inputs before it is rounded: what GPTAQ and Qronos add to GPTQ.

The weight that makes up best for ``X̃`` in place of ``X`` is the minimum of ``‖W X − V X̃‖² + λ ‖W − V‖²`` over V, which is
``V = W + W D (H + λ I)⁻¹``; any rounding of W for this objective is a rounding of V for plain ‖(V − Q) X̃‖². Of that step a share α is
taken: 0 is GPTQ, 1 is Qronos but for the first column, and GPTAQ takes a quarter. Source: spec of the algorithms, §0.1 and §1.3–1.4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quark_algos.columns.factor import Factor


def corrected(wt: Tensor, d: Tensor, factor: Factor, alpha: float) -> Tensor:
    """``Wᵀ + α (H + λ I)⁻¹ Dᵀ Wᵀ``.

    Args:
        wt: Wᵀ ``[K, N]``.
        d: D ``[K, K]``.
        factor: Of H, in the channels' own order; its damping says how far the correction may go.
        alpha: α.
    """
    step = torch.mm(d.t(), wt)  # [K, N]
    # H + λ I = R Rᵀ, R = A · diag(√d): two triangular solves.
    r = factor.a * factor.pivots.sqrt()
    step = torch.linalg.solve_triangular(r, step, upper=True)
    step = torch.linalg.solve_triangular(r.t(), step, upper=False)
    return wt + step.mul_(alpha)
