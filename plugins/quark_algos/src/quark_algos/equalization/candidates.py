"""Candidates for the scales of a mapping, and the squared output error by which candidates are compared."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

__all__ = ["EIGENVALUE_FLOOR", "RANK", "SMALLEST", "Quadratic", "by_activations", "by_both", "is_known", "relative_weights"]


SMALLEST = 1e-4
"""The smallest scale of AWQ before normalization.

The reference implementation of AWQ uses the same limit.
"""


def by_activations(x: Tensor, ratios: Tensor) -> Tensor:
    """Return AWQ's scales, ``x^r``. They are normalized so that the largest scale times the smallest scale is
    1.

    Source: arXiv 2306.00978, eq. 5.

    Args:
        x: Mean or largest magnitude of each channel of the activations, ``[C]``, float32.
        ratios: The exponents r, ``[R]``. The exponent 0 gives scales of 1.

    Returns: Scales ``[R, C]``, float32. A channel that is always 0 gets the scale 1.
    """
    return _normalized(x.float().pow(ratios[:, None].float()), is_known(x))


def by_both(x: Tensor, w: Tensor, ratios: Tensor) -> Tensor:
    """Return scales ``x^r / w^(1−r)`` from activations x and weights w ("duo scaling").

    The scales are normalized as in `by_activations`. For AWQ, ``w`` is the result of `relative_weights`.

    Args:
        x: As in `by_activations`.
        w: For each channel, the mean relative magnitude or the largest magnitude of the weights, ``[C]``,
            float32.
        ratios: The exponents r, ``[R]``.

    Returns: Scales ``[R, C]``, float32. A channel whose activations or weights are all 0 gets the scale 1.
    """
    ratios = ratios[:, None].float()
    return _normalized(x.float().pow(ratios) / (w.float().pow(1 - ratios) + SMALLEST), is_known(x) & is_known(w))


def relative_weights(wt: Tensor, group: int) -> Tensor:
    """Return the mean relative magnitude of the weights of each input channel. The result is ``[K]``, with
    values from 0 to 1.

    The relative magnitude of an element is its magnitude divided by the largest magnitude in the same group
    and the same row of W. The mean is over all rows.

    Args:
        wt: Wᵀ ``[K, N]``, float32.
        group: Number of input channels that share a scale.
    """
    size = wt.abs().view(-1, group, wt.shape[1])
    return size.div_(size.amax(1, keepdim=True).clamp_min(torch.finfo(wt.dtype).tiny)).mean(2).flatten()


def is_known(x: Tensor) -> Tensor:
    """Return a mask of the channels whose value is finite and above 0."""
    return (x > 0) & torch.isfinite(x)


def _normalized(s: Tensor, known: Tensor) -> Tensor:
    s = torch.where(known, s.clamp_min(SMALLEST), torch.ones_like(s))
    centre = (torch.where(known, s, 0).amax(1) * torch.where(known, s, torch.inf).amin(1)).sqrt()
    return torch.where(known, s / centre[:, None], s)


RANK = 64
"""Rank of the low-rank approximation of H. The remainder of H is approximated by its diagonal."""

EIGENVALUE_FLOOR = 1e-6
"""Eigenvalues below this share of the largest one are rounding noise of float32. They are dropped, because
their reciprocals would be large.
"""


class Quadratic:
    """Computes ``tr(ΔW H ΔWᵀ)`` for the Hessian ``H = Σ x xᵀ`` and a rounding error ΔW.

    This is the squared output error, summed over tokens and rows.

    The exact product needs ``2 K² N`` operations. To compare many candidates, H is approximated by
    ``F Fᵀ + diag(d)``, which needs ``2 K RANK N`` operations. F Fᵀ is a Nyström approximation from a random
    subspace, and captures the directions in which H is large. d is the diagonal of the remainder
    ``H − F Fᵀ``, and is never negative. The other entries of the remainder are neglected, because their
    contributions mostly cancel.

    Sources: Gittens, Mahoney, arXiv 1303.1849, for the approximation; arXiv 2210.17323, equation 1, for the
    loss.

    Args:
        h: H ``[K, K]``, symmetric and positive semidefinite, float32 or float64. It is not copied and not
            changed.

    Attributes:
        h: H ``[K, K]``.
    """

    def __init__(self, h: Tensor) -> None:
        self.h = h

    def prepare(self) -> None:
        """Compute the approximation of H. Call this method before several threads use the object."""
        if not self._is_small:
            _ = self._parts

    def rows(self, delta: Tensor) -> Tensor:
        """Return the loss of each row, ``[N]``, for ``ΔWᵀ [K, N]``. The loss is exact if K ≤ 2 · `RANK`."""
        if self._is_small:
            return (self.h @ delta).mul_(delta).sum(0)
        factor, rest = self._parts
        return (factor.t() @ delta).square_().sum(0) + rest @ delta.square()

    @property
    def _is_small(self) -> bool:
        return self.h.shape[0] <= 2 * RANK

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor]:
        """Return F ``[K, RANK]`` and d ``[K]`` of the approximation ``F Fᵀ + diag(d)``."""
        # Random numbers are drawn on the CPU, so that the approximation is the same on every device.
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
