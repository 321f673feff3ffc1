"""LQER: a low-rank product is added to the output of a layer. It has the largest singular directions of the
rounding error.

The notation follows the papers. ``W [N, K]`` is the float weight, ``Q`` is the rounded weight, and ``E = W −
Q`` is the rounding error. ``S [K, K]`` weights the input channels. ``U [N, r]`` has the first left singular
vectors of ``E S``. The layer computes ``Q x + B (A x)`` with ``B A = U Uᵀ E``. Of all products of rank r,
this one has the smallest ``‖(E − B A) S‖``.

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
"""This share of the mean of H's diagonal is added to the diagonal, so that H has a Cholesky factor."""


class LowRank(Branch):
    """A module that computes ``B A x``. A and B are two thin matrices.

    Args:
        rank: r, the number of rows of A.
        inputs: K, the number of input channels.
        outputs: N, the number of output channels.
        dtype: Dtype of A and B.
    """

    def __init__(self, rank: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(rank, inputs, dtype=dtype), requires_grad=False)
        self.b = nn.Parameter(torch.empty(outputs, rank, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``B A x`` as a tensor ``[…, N]``, for an input ``x [..., K]``."""
        return functional.linear(functional.linear(x.to(self.a.dtype), self.a), self.b)


class LQER(Branching):
    """Adds a low-rank product to the output of each quantized linear layer."""

    def __init__(self, settings: LQERConfig) -> None:
        self._settings = settings
        self._statistic = {"hessian": Hessian, "abs_mean": AbsMean, "none": None}[settings.scaling]
        self.needs = () if self._statistic is None else (self._statistic,)

    def branch(self, site: BranchSite) -> LowRank:
        """Return a low-rank product for a layer. Its tensors are not initialized."""
        rows, columns = site.shape
        return LowRank(min(self._settings.rank, rows, columns), columns, rows, site.dtype)

    def weight_to_round(self, task: BranchTask) -> Tensor:
        """Return the weight to round. If ``from_weight`` is set, this is the original weight minus a low-rank
        product.
        """
        if not self._settings.from_weight:
            return task.weight
        a, b = self._product(task, task.weight.double())
        return (task.weight.double() - b @ a).to(task.weight.dtype)

    def tensors(self, task: BranchTask) -> Mapping[str, Tensor]:
        """Return the tensors A and B of the product that approximates the rounding error."""
        assert task.rounded is not None
        a, b = self._product(task, task.weight.double() - task.rounded.double())
        return {"a": a.to(task.site.dtype), "b": b.to(task.site.dtype)}

    def _product(self, task: BranchTask, error: Tensor) -> tuple[Tensor, Tensor]:
        """Return A ``[r, K]`` and B ``[N, r]``, whose product approximates a matrix ``error [N, K]``. All
        tensors are float64.

        Each row of A has the same norm as the corresponding column of B.
        """
        rank = min(self._settings.rank, *error.shape)
        u = _left_singular_vectors(self._weighed(task, error), rank)
        a = u.t() @ error
        size = torch.linalg.vector_norm(a, dim=1).clamp(min=torch.finfo(torch.float32).tiny).sqrt()  # [r]
        return a / size[:, None], u * size

    def _weighed(self, task: BranchTask, error: Tensor) -> Tensor:
        """Return ``E S``, or E if there is no statistic of the input."""
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
    """Return the first left singular vectors of a matrix M ``[N, K]``, as a tensor ``[N, rank]``.

    They are computed from ``M Mᵀ`` or ``Mᵀ M``, whichever is smaller.
    """
    rows, columns = matrix.shape
    if rows <= columns:
        return torch.linalg.eigh(matrix @ matrix.t()).eigenvectors[:, -rank:].flip(1)
    v = torch.linalg.eigh(matrix.t() @ matrix).eigenvectors[:, -rank:].flip(1)  # [K, rank]
    # The columns of M V are orthogonal. QR gives them unit length, even if they are 0.
    return torch.linalg.qr(matrix @ v).Q
