"""Candidate scales of a mapping, one per channel, and the squared output error by which they are compared."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

__all__ = ["EIGENVALUE_FLOOR", "RANK", "SMALLEST", "Quadratic", "by_activations", "by_both", "is_known", "relative_weights"]


SMALLEST = 1e-4
"""Smallest scale of AWQ before normalization.

The reference implementation of AWQ clamps at the same value.
"""


def by_activations(x: Tensor, ratios: Tensor) -> Tensor:
    """Return AWQ's scales, ``x^r``, with the geometric mean of largest and smallest normalized to 1.

    Source: arXiv 2306.00978, eq. 5.

    Args:
        x: Mean or largest magnitude of each channel of the activations, ``[C]``, float32.
        ratios: Exponents, ``[R]``; 0 gives scales of 1.

    Returns:
        Scales ``[R, C]``, float32; 1 for channels that are always 0.
    """
    return _normalized(x.float().pow(ratios[:, None].float()), is_known(x))


def by_both(x: Tensor, w: Tensor, ratios: Tensor) -> Tensor:
    """Return scales from activations and weights ("duo scaling"), ``x^r / w^(1−r)``, normalized.

    AWQ passes `relative_weights` as ``w``.

    Args:
        x: As in `by_activations`.
        w: Mean relative magnitude, or the largest magnitude, of each channel of the weights, ``[C]``,
            float32.
        ratios: Exponents, ``[R]``.

    Returns:
        Scales ``[R, C]``, float32; 1 for channels whose activations or weights are all 0.
    """
    ratios = ratios[:, None].float()
    return _normalized(x.float().pow(ratios) / (w.float().pow(1 - ratios) + SMALLEST), is_known(x) & is_known(w))


def relative_weights(wt: Tensor, group: int) -> Tensor:
    """Return the mean over rows of ``|w| ÷ max|w| of its group and row``, per input channel: ``[K]``, 0 to 1.

    Args:
        wt: Wᵀ ``[K, N]``, float32.
        group: Input channels that share a scale.
    """
    size = wt.abs().view(-1, group, wt.shape[1])
    return size.div_(size.amax(1, keepdim=True).clamp_min(torch.finfo(wt.dtype).tiny)).mean(2).flatten()


def is_known(x: Tensor) -> Tensor:
    """Return which channels are finite and not 0."""
    return (x > 0) & torch.isfinite(x)


def _normalized(s: Tensor, known: Tensor) -> Tensor:
    s = torch.where(known, s.clamp_min(SMALLEST), torch.ones_like(s))
    centre = (torch.where(known, s, 0).amax(1) * torch.where(known, s, torch.inf).amin(1)).sqrt()
    return torch.where(known, s / centre[:, None], s)


RANK = 64
"""Rank of the approximation of H; the rest of H is approximated by its diagonal."""

EIGENVALUE_FLOOR = 1e-6
"""Eigenvalues below this share of the largest are rounding noise of float32; their reciprocals would be
large, so they are dropped.
"""


class Quadratic:
    """Computes ``tr(ΔW H ΔWᵀ)`` for the Hessian ``H = Σ x xᵀ``.

    It is the squared output error, summed over tokens and rows.

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
        """Return the loss of each row ``[N]``, for ``ΔWᵀ [K, N]``; it is exact if K ≤ 2 · `RANK`."""
        if self._is_small:
            return (self.h @ delta).mul_(delta).sum(0)
        factor, rest = self._parts
        return (factor.t() @ delta).square_().sum(0) + rest @ delta.square()

    @property
    def _is_small(self) -> bool:
        return self.h.shape[0] <= 2 * RANK

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor]:
        """Return F ``[K, RANK]`` and d ``[K]``."""
        # Drawn on the CPU, so that the approximation is the same on every device.
        drawn = torch.randn(self.h.shape[0], RANK, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        subspace = self.h @ drawn.to(self.h)
        basis, _ = torch.linalg.qr(subspace)
        image = self.h @ basis
        core = (basis.t() @ image).double()
        values, vectors = torch.linalg.eigh((core + core.t()) / 2)
        is_significant = values > values[-1] * EIGENVALUE_FLOOR
        inverse_root = torch.where(is_significant, values.clamp_min(torch.finfo(values.dtype).tiny).rsqrt(), torch.zeros_like(values))
        factor = image @ (vectors * inverse_root).to(image)
        return factor, (self.h.diagonal() - factor.square().sum(1)).clamp_min(0)
