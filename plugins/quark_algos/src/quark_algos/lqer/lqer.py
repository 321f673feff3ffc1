"""LQER: the largest singular directions of the rounding error, as a low-rank product beside the layer.

Notation, after the papers: ``W [N, K]`` is the float weight, ``Q`` the rounded one, ``E = W − Q``;
``S [K, K]`` weighs input channels; ``U [N, r]`` has the first left singular vectors of ``E S``. The layer
computes ``Q x + B (A x)`` with ``B A = U Uᵀ E``, the product of rank r for which ``‖(E − B A) S‖`` is least.

Sources: Zhang et al., "LQER", 2024 (S is diagonal); Zhang et al., "QERA", 2024 (``S Sᵀ`` is the second moment
of the input); Li et al., "SVDQuant", 2024 (a part of W is subtracted before rounding).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from quark.algorithms import AbsMean, Branching, BranchSite, BranchTask, Hessian
from quark.models.layers import Branch
from quark_algos.lqer.config import LQERConfig

__all__ = ["LQER", "LowRank"]

_DAMPING = 1e-4
"""Share of the mean of H's diagonal that is added to it, so that it has a Cholesky factor."""


class LowRank(Branch):
    """The product ``B A x`` of two thin matrices.

    Args:
        rank: r, the rows of A.
        inputs: K.
        outputs: N.
        dtype: Dtype of A and B.
    """

    def __init__(self, rank: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(rank, inputs, dtype=dtype), requires_grad=False)
        self.b = nn.Parameter(torch.empty(outputs, rank, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product, ``[…, N]``, of ``x [..., K]``."""
        return functional.linear(functional.linear(x.to(self.a.dtype), self.a), self.b)


class LQER(Branching):
    """Puts a low-rank product beside each quantized linear layer."""

    def __init__(self, settings: LQERConfig) -> None:
        self._settings = settings
        self._statistic = {"hessian": Hessian, "abs_mean": AbsMean, "none": None}[settings.scaling]
        self.needs = () if self._statistic is None else (self._statistic,)

    def branch(self, site: BranchSite) -> LowRank:
        """Return an empty product."""
        rows, columns = site.shape
        return LowRank(min(self._settings.rank, rows, columns), columns, rows, site.dtype)

    def weight_to_round(self, task: BranchTask) -> Tensor:
        """Return the weight; with ``from_weight``, minus its own low-rank product."""
        if not self._settings.from_weight:
            return task.weight
        a, b = self._product(task, task.weight.double())
        return (task.weight.double() - b @ a).to(task.weight.dtype)

    def tensors(self, task: BranchTask) -> Mapping[str, Tensor]:
        """Return A and B of the rounding error."""
        assert task.rounded is not None
        a, b = self._product(task, task.weight.double() - task.rounded.double())
        return {"a": a.to(task.site.dtype), "b": b.to(task.site.dtype)}

    def _product(self, task: BranchTask, error: Tensor) -> tuple[Tensor, Tensor]:
        """Return A ``[r, K]`` and B ``[N, r]`` of a matrix ``[N, K]``, all float64.

        Each row of A has the same norm as its column of B.
        """
        rank = min(self._settings.rank, *error.shape)
        u = _left_singular_vectors(self._weighed(task, error), rank)
        a = u.t() @ error
        size = torch.linalg.vector_norm(a, dim=1).clamp(min=torch.finfo(torch.float32).tiny).sqrt()  # [r]
        return a / size[:, None], u * size

    def _weighed(self, task: BranchTask, error: Tensor) -> Tensor:
        """Return ``E S``; E itself if there is no statistic of the input."""
        statistic = None if self._statistic is None else task.statistic(self._statistic)
        if isinstance(statistic, AbsMean) and statistic.tokens:
            return error * statistic.value.double().clamp(min=torch.finfo(torch.float32).tiny)
        if isinstance(statistic, Hessian) and statistic.tokens:
            return error @ statistic.derived(_cholesky)
        return error


def _cholesky(hessian: Hessian) -> Tensor:
    """Return the lower Cholesky factor of the damped second moment of the input, ``[K, K]``, float64."""
    h = hessian.matrix().double() / hessian.tokens
    mean = h.diagonal().mean()
    return torch.linalg.cholesky(h + (_DAMPING * mean + (mean == 0)) * torch.eye(len(h), dtype=h.dtype, device=h.device))


def _left_singular_vectors(matrix: Tensor, rank: int) -> Tensor:
    """Return the first left singular vectors of ``M [N, K]``, ``[N, rank]``.

    They come from the smaller one of ``M Mᵀ`` and ``Mᵀ M``.
    """
    rows, columns = matrix.shape
    if rows <= columns:
        return torch.linalg.eigh(matrix @ matrix.t()).eigenvectors[:, -rank:].flip(1)
    v = torch.linalg.eigh(matrix.t() @ matrix).eigenvectors[:, -rank:].flip(1)  # [K, rank]
    # The columns of M V are orthogonal; QR gives them unit length, also columns of zeros.
    return torch.linalg.qr(matrix @ v).Q
