"""Damping of the Hessian, and its factor: ``H + λ I = A · diag(d) · Aᵀ``, A upper triangular.

The diagonal of A is 1. All three roundings use this factor.

The published GPTQ factors the inverse of H instead and gives the same codes, so no inverse is needed.
Sources: GPTQ, arXiv 2210.17323; LDLQ, arXiv 2307.13304.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from quark.base.scalars import numbers
from quark.errors import NonFiniteError, RoundingError

__all__ = [
    "ATTEMPTS",
    "NONE",
    "PANEL",
    "Factor",
    "SingularError",
    "damped",
    "damped_diagonal",
    "factor",
    "largest_eigenvalue",
    "percdamp_of",
    "shrunk",
]

NONE = (0.0, 0.0)
"""Shrinkage that does not change H."""
ATTEMPTS = 5
"""Attempts at a factorisation, each with ten times the damping of the one before."""

PANEL = 96
"""Columns that LAPACK factors at a time on CPUs."""


class SingularError(RoundingError):
    """A Hessian cannot be factored, even with the strongest damping."""


@attrs.frozen(eq=False)
class Factor:
    """``H + λ I`` in factors, for one order of the channels.

    Attributes:
        a: A ``[K, K]``, upper triangular, of unit diagonal.
        pivots: d ``[K]``.
        damping: λ as a share of the mean of H's diagonal.
        attempts: Number of attempts, each with stronger damping.
        inner: Unit triangles that were divided out of A, of the vectors on its diagonal ``[K / v, v, v]``
            (`quark_algos.gptq.vectors`); None for single columns.
    """

    a: Tensor
    pivots: Tensor
    damping: float
    attempts: int = 1
    inner: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Factor:
        """Return the factor in another precision."""
        return attrs.evolve(self, a=self.a.to(dtype), pivots=self.pivots.to(dtype))


def shrunk(h: Tensor, shrinkage: tuple[float, float]) -> Tensor:
    """Return a copy of ``h [K, K]`` with less sampling noise.

    Shrinkage helps for any number of tokens.

    Args:
        h: H, symmetric.
        shrinkage: Result of `quark.algorithms.Hessian.shrinkage`: the share that off-diagonal entries lose,
            and how far diagonal entries move towards their mean. Dead channels stay dead.
    """
    off_diagonal, along = shrinkage
    made = h * (1 - off_diagonal)
    made.diagonal().copy_(_shrunk_diagonal(h.diagonal(), along))
    return made


def damped(h: Tensor, share: float, shrinkage: tuple[float, float] = NONE) -> Tensor:
    """Return a copy of ``h [K, K]``, shrunk, with ``share`` of its mean diagonal added to the diagonal.

    Dead channels, which are 0 in all tokens, get the mean.
    """
    return _damp_(h.clone(), share, shrinkage)


def _damp_(h: Tensor, share: float, shrinkage: tuple[float, float]) -> Tensor:
    """Shrink and damp ``h`` in place, as `damped`; return it."""
    diagonal = damped_diagonal(h.diagonal(), share, shrinkage)
    if shrinkage != NONE:
        h.mul_(1 - shrinkage[0])
    h.diagonal().copy_(diagonal)
    return h


def _shrunk_diagonal(diagonal: Tensor, along: float) -> Tensor:
    """Return the diagonal of `shrunk`."""
    alive = diagonal > 0
    mean = diagonal.sum() / alive.sum().clamp(min=1)
    return torch.where(alive, torch.lerp(diagonal, mean, along), diagonal)


def damped_diagonal(diagonal: Tensor, share: float, shrinkage: tuple[float, float] = NONE) -> Tensor:
    """Return the diagonal of `damped` from the diagonal of H ``[K]``."""
    dead = diagonal <= 0
    number_alive = (~dead).sum()
    mean = torch.where(number_alive > 0, torch.where(dead, 0, diagonal).sum() / number_alive, 1)
    return torch.where(dead, mean, _shrunk_diagonal(diagonal, shrinkage[1]).add_(mean.double() * share))


def factor(h: Tensor, share: float, order: Tensor | None = None, shrinkage: tuple[float, float] = NONE) -> Factor:
    """Shrink a Hessian, damp it, and factor it.

    Args:
        h: H ``[K, K]``, symmetric, the raw sum or any multiple, float32 or float64.
        share: λ as a share of the mean diagonal. Each failure multiplies it by 10; the result has the final
            value.
        order: A permutation of the channels ``[K]``; the result is the factor of the permuted matrix.
        shrinkage: As in `shrunk`.

    Raises:
        NonFiniteError: ``h`` holds NaN or Inf.
        SingularError: ``h`` stays indefinite with all damping.
    """
    backwards = None if order is None else order.flip(0)
    for attempt in range(1, ATTEMPTS + 1):
        # H = R Rᵀ with R upper triangular is the Cholesky factor of H with rows and columns reversed,
        # reversed again.
        turned = h.flip(0, 1) if backwards is None else h.index_select(0, backwards).index_select(1, backwards)
        exact = turned.double() if attempt == ATTEMPTS else turned
        lower, failed = _cholesky(_damp_(exact, share, shrinkage))
        is_finite, has_failed = numbers(torch.isfinite(h.diagonal()).all(), failed)
        if not is_finite:
            raise NonFiniteError(
                "the Hessian of a layer's inputs holds NaN or Inf: activations overflow during calibration. Use another dtype, or check "
                "the data",
                tensor="input",
            )
        if not has_failed:
            r = lower.flip(0, 1)  # [K, K]
            root = r.diagonal().clone()
            return Factor(r.div_(root), root.square_(), share, attempt).to(h.dtype)
        share = max(share, 1e-6) * 10
    raise SingularError(
        f"the Hessian of a layer's inputs [{h.shape[0]} channels] is not positive definite even with damping {share / 10:g}: there are "
        f"too few calibration data, or they are degenerate. Give more sequences"
    )


def _cholesky(h: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower triangular ``L [K, K]`` with ``L Lᵀ = h``, and a number.

    The number is 0 if ``h`` is positive definite; ``h`` is overwritten.

    On CPUs, more than two panels are factored with the inverse of each corner block. Nearly all work is then
    matrix products, which are faster than LAPACK and triangular solves.
    """
    if h.device.type != "cpu" or h.shape[0] <= 2 * PANEL:
        return torch.linalg.cholesky_ex(h)
    failed = torch.zeros((), dtype=torch.int32)
    for start in range(0, h.shape[0], PANEL):
        stop = min(start + PANEL, h.shape[0])
        corner, failed = torch.linalg.cholesky_ex(h[start:stop, start:stop])
        if bool(failed):
            break
        h[start:stop, start:stop] = corner
        h[start:stop, stop:] = 0
        if stop == h.shape[0]:
            break
        inverse = torch.linalg.solve_triangular(corner, torch.eye(stop - start, dtype=h.dtype), upper=False)
        below = h[stop:, start:stop] @ inverse.mT
        h[stop:, start:stop] = below
        for left in range(stop, h.shape[0], 2 * PANEL):  # of the remaining square, the lower half
            right = min(left + 2 * PANEL, h.shape[0])
            h[left:, left:right].addmm_(below[left - stop :], below[left - stop : right - stop].mT, alpha=-1)
    return h, failed


def largest_eigenvalue(h: Tensor, steps: int = 30) -> float:
    """Return the largest eigenvalue of a positive semidefinite ``h [K, K]``, or slightly less.

    It is found by power iteration from the diagonal.
    """
    v = h.diagonal().clone()
    for _ in range(steps):
        v = v / v.norm().clamp(min=torch.finfo(h.dtype).tiny)
        v = h @ v
    return float(v.norm())


def percdamp_of(h: Tensor, share: float) -> float:
    """Return the percdamp that adds ``share`` of the largest eigenvalue of ``h [K, K]`` to its diagonal."""
    mean = max(float(h.diagonal().mean()), torch.finfo(h.dtype).tiny)
    return share * largest_eigenvalue(h) / mean
