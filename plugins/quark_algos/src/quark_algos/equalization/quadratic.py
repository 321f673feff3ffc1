"""Quadratic: the squared output error that a change of a weight causes, ``δ H δᵀ`` summed over rows; exact or approximate."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

__all__ = ["EIGENVALUE_FLOOR", "RANK", "Quadratic", "moved"]

RANK = 64
"""Rank of the approximation of H; the rest of H is approximated by its diagonal."""

EIGENVALUE_FLOOR = 1e-6
"""Eigenvalues below this share of the largest are rounding noise of float32; their reciprocals would be
large, so they are dropped.
"""


class Quadratic:
    """Computes ``tr(ΔW H ΔWᵀ)``, the squared output error summed over tokens and rows, for the Hessian ``H = Σ x xᵀ``.

    The exact product costs ``2 K² N``. To screen many candidates, H is approximated by ``F Fᵀ + diag(d)``,
    which costs ``2 K RANK N``: F Fᵀ is the Nyström approximation from a random subspace, which captures the
    large directions of H, and d is the diagonal of the remainder, which is never negative. Off the diagonal
    of the remainder, rounding errors mostly cancel.

    Source: for the approximation Gittens, Mahoney, arXiv 1303.1849; for the loss arXiv 2210.17323, equation
    1.

    Args:
        h: H ``[K, K]``, symmetric, positive semidefinite, float32 or float64; stored by reference, not
            changed.

    Attributes:
        h: H ``[K, K]``.
    """

    def __init__(self, h: Tensor) -> None:
        self.h = h

    def prepare(self) -> None:
        """Compute the approximation of H once, before several threads use it."""
        if not self._is_small:
            _ = self._parts

    def rows(self, delta: Tensor) -> Tensor:
        """Return the exact loss of each row ``[N]``, for ``ΔWᵀ [K, N]``."""
        return (self.h @ delta).mul_(delta).sum(0)

    def exact(self, delta: Tensor) -> Tensor:
        """Return the exact loss summed over rows, a scalar."""
        return self.rows(delta).sum()

    def rows_nearly(self, delta: Tensor) -> Tensor:
        """Return the approximate loss of each row ``[N]``; exact if K ≤ 2 · `RANK`."""
        if self._is_small:
            return self.rows(delta)
        factor, rest = self._parts
        return (factor.t() @ delta).square_().sum(0) + rest @ delta.square()

    def nearly(self, delta: Tensor) -> Tensor:
        """Return the approximate loss summed over rows; exact if K ≤ 2 · `RANK`."""
        return self.rows_nearly(delta).sum()

    @property
    def _is_small(self) -> bool:
        return self.h.shape[0] <= 2 * RANK

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor]:
        """Return F ``[K, RANK]`` and d ``[K]``."""
        # Drawn on the CPU, so that the approximation is the same on every device.
        drawn = torch.randn(self.h.shape[0], RANK, generator=torch.Generator().manual_seed(0))
        subspace = self.h @ drawn.to(self.h)
        basis, _ = torch.linalg.qr(subspace)
        image = self.h @ basis
        core = (basis.t() @ image).double()
        values, vectors = torch.linalg.eigh((core + core.t()) / 2)
        is_significant = values > values[-1] * EIGENVALUE_FLOOR
        inverse_root = torch.where(is_significant, values.clamp_min(torch.finfo(values.dtype).tiny).rsqrt(), torch.zeros_like(values))
        factor = image @ (vectors * inverse_root).to(image)
        return factor, (self.h.diagonal() - factor.square().sum(1)).clamp_min(0)


def moved(h: Tensor, s: Tensor) -> Tensor:
    """Return the Hessian of inputs divided by ``s [K]``, ``diag(1/s) H diag(1/s)``, from ``H [K, K]`` of the inputs."""
    return h / s[:, None] / s
