"""The algorithms as their papers and first implementations write them, in float64.

Oracles for the one solver.

Weights are ``W [N, K]``, ``H = X̃ X̃ᵀ`` and ``D = (X − X̃) X̃ᵀ`` are ``[K, K]``; a rounding takes column k of
W, ``[N]``, and k. Damping, order and dead channels are the callers'. Slow on purpose: nothing is shared with
what is tested.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Nearest = Callable[[Tensor, int], Tensor]


def gptq(W: Tensor, H: Tensor, nearest: Nearest, block: int = 128) -> Tensor:
    """Cholesky, inverse, Cholesky; then column after column with lazy blocks.

    Source: arXiv 2210.17323, algorithm 1.
    """
    return gptaq(W, H, torch.zeros_like(H), 0.0, nearest, block)


def gptaq(W: Tensor, H: Tensor, D: Tensor, alpha: float, nearest: Nearest, block: int = 128) -> Tensor:
    """GPTQ, and a share α of each column's own residual by P = ((D L) ⊙ strictly upper) Lᵀ.

    Source: arXiv 2504.02692, algorithm 1.
    """
    W, Q, K = W.clone(), torch.zeros_like(W), W.shape[1]
    U = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(H)), upper=True)  # UᵀU = H⁻¹
    P = alpha * ((D @ U.t()).triu(1) @ U)  # [K, K]
    for start in range(0, K, block):
        stop = min(start + block, K)
        W1 = W[:, start:stop].clone()
        errors, before = torch.zeros_like(W1), torch.zeros_like(W1)
        for i in range(start, stop):
            w = W1[:, i - start].clone()
            Q[:, i] = nearest(w.clone(), i)
            error = (w - Q[:, i]) / U[i, i]
            W1[:, i - start :] -= torch.outer(error, U[i, i:stop]) - torch.outer(w, P[i, i:stop])
            errors[:, i - start], before[:, i - start] = error, w
        W[:, stop:] -= errors @ U[start:stop, stop:] - before @ P[start:stop, stop:]
    return Q


def qronos(W: Tensor, H: Tensor, D: Tensor, nearest: Nearest) -> Tensor:
    """Every column rounded, then all later ones solved for anew; the first with the others as they are.

    Source: arXiv 2505.11695, §3.
    """
    target, K = W @ (H + D), W.shape[1]  # W G
    Q = torch.zeros_like(W)
    Q[:, 0] = nearest((target[:, 0] - W[:, 1:] @ H[1:, 0]) / H[0, 0], 0)
    for k in range(1, K):
        rest = torch.linalg.solve(H[k:, k:], (target[:, k:] - Q[:, :k] @ H[:k, k:]).t()).t()  # [N, K - k]
        Q[:, k] = nearest(rest[:, 0].clone(), k)
    return Q


def objective(E: Tensor, H: Tensor) -> Tensor:
    """``e H eᵀ`` of each row of ``E [N, K]``."""
    return torch.einsum("nj,jk,nk->n", E, H, E)
