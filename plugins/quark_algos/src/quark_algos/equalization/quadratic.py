"""Quadratic: the squared error that a change of a weight makes in the outputs, ``δ H δᵀ`` summed over rows; exact or approximate."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

__all__ = ["RANK", "Quadratic", "moved"]

RANK = 64
"""Directions of H that the approximation keeps; in all others channels count as independent."""


class Quadratic:
    """``tr(ΔW H ΔWᵀ)``, the squared error of the outputs summed over tokens and rows, for ``H = Σ x xᵀ``.

    The product costs ``2 K² N``. For a screening of many candidates H is taken as ``F Fᵀ + diag(d)``, which costs ``2 K RANK N``: the
    Nyström approximation by a random subspace, in which the large directions of H lie, and the diagonal of what it leaves, which is never
    negative. Off that diagonal errors of rounding mostly cancel.

    Source of the approximation: Gittens, Mahoney, arXiv 1303.1849; of the loss: spec of the algorithms, §1.5.

    Args:
        h: H ``[K, K]``, symmetric, positive semidefinite, float32 or float64; kept, not changed.

    Attributes:
        h: The same.
    """

    def __init__(self, h: Tensor) -> None:
        self.h = h

    def prepare(self) -> None:
        """Compute what `nearly` needs, once and before several threads want it."""
        if not self._is_small:
            _ = self._parts

    def rows(self, delta: Tensor) -> Tensor:
        """The exact loss of each row ``[N]``, for ``ΔWᵀ [K, N]``."""
        return (self.h @ delta).mul_(delta).sum(0)

    def exact(self, delta: Tensor) -> Tensor:
        """Their sum, a scalar."""
        return self.rows(delta).sum()

    def rows_nearly(self, delta: Tensor) -> Tensor:
        """Nearly the same as `rows`; exactly where K is small."""
        if self._is_small:
            return self.rows(delta)
        factor, rest = self._parts
        return (factor.t() @ delta).square_().sum(0) + rest @ delta.square()

    def nearly(self, delta: Tensor) -> Tensor:
        """Nearly the same as `exact`; exactly where K is small."""
        return self.rows_nearly(delta).sum()

    @property
    def _is_small(self) -> bool:
        return self.h.shape[0] <= 2 * RANK

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor]:
        """F ``[K, RANK]`` and d ``[K]``."""
        # Numbers are drawn on the CPU, so that every device screens alike.
        drawn = torch.randn(self.h.shape[0], RANK, generator=torch.Generator().manual_seed(0))
        subspace = self.h @ drawn.to(self.h)
        basis, _ = torch.linalg.qr(subspace)
        image = self.h @ basis
        core = (basis.t() @ image).double()
        values, vectors = torch.linalg.eigh((core + core.t()) / 2)
        is_there = values > values[-1] * 1e-6  # what is smaller is rounding, and its reciprocal would be large
        inverse_root = torch.where(is_there, values.clamp_min(torch.finfo(values.dtype).tiny).rsqrt(), torch.zeros_like(values))
        factor = image @ (vectors * inverse_root).to(image)
        return factor, (self.h.diagonal() - factor.square().sum(1)).clamp_min(0)


def moved(h: Tensor, s: Tensor) -> Tensor:
    """What ``H [K, K]`` becomes when inputs are divided by ``s [K]``: ``diag(1/s) H diag(1/s)``, without seeing them again."""
    return h / s[:, None] / s
