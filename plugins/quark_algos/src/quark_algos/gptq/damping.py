"""Damping and factorization of the Hessian: ``H + λ I = A · diag(d) · Aᵀ``.

A is upper triangular, and its diagonal is 1. GPTQ, GPTAQ and Qronos use this factor.

The published GPTQ factors the inverse of ``H + λ I`` instead. Both factorizations give the same codes, so
this implementation does not compute the inverse. Sources: GPTQ, arXiv 2210.17323; LDLQ, arXiv 2307.13304.
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
"""The shrinkage that does not change H."""
ATTEMPTS = 5
"""Maximum number of attempts to factor H. Each attempt has ten times the damping of the previous one."""

PANEL = 96
"""Number of columns that LAPACK factors at a time on a CPU."""


class SingularError(RoundingError):
    """The error that is raised if a Hessian cannot be factored, even with the strongest damping."""


@attrs.frozen(eq=False)
class Factor:
    """The factors A and d of ``H + λ I = A · diag(d) · Aᵀ``, for one order of the channels.

    Attributes:
        a: A ``[K, K]``, upper triangular, with a diagonal of ones.
        pivots: d ``[K]``.
        damping: λ as a share of the mean of H's diagonal.
        attempts: Number of attempts that the factorization needed. Each attempt uses stronger damping than
            the one before.
        inner: The triangular blocks ``[K / v, v, v]`` on the diagonal of A, for formats that encode v columns
            together. In this case, ``a`` has been divided by these blocks (see `quark_algos.gptq.vectors`).
            It is None for formats that encode each column alone.
    """

    a: Tensor
    pivots: Tensor
    damping: float
    attempts: int = 1
    inner: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Factor:
        """Return the same factors in another dtype."""
        return attrs.evolve(self, a=self.a.to(dtype), pivots=self.pivots.to(dtype))


def shrunk(h: Tensor, shrinkage: tuple[float, float]) -> Tensor:
    """Return a shrunk copy of ``h [K, K]``, which has less sampling noise.

    Shrinkage is useful for any number of tokens. The entries of channels that are always 0 remain 0.

    Args:
        h: H. It is symmetric.
        shrinkage: The result of `quark.algorithms.Hessian.shrinkage`. The first number is the share by which
            off-diagonal entries are reduced. The second number is the share of the distance to their mean by
            which diagonal entries are moved.
    """
    off_diagonal, along = shrinkage
    made = h * (1 - off_diagonal)
    made.diagonal().copy_(_shrunk_diagonal(h.diagonal(), along))
    return made


def damped(h: Tensor, share: float, shrinkage: tuple[float, float] = NONE) -> Tensor:
    """Return a copy of ``h [K, K]`` that is shrunk and damped.

    For damping, ``share`` times the mean of the diagonal is added to the diagonal. The diagonal entry of a
    channel that is 0 in all tokens is set to the mean.
    """
    return _damp_(h.clone(), share, shrinkage)


def _damp_(h: Tensor, share: float, shrinkage: tuple[float, float]) -> Tensor:
    """Shrink and damp ``h`` in place, as `damped` does, and return it."""
    diagonal = damped_diagonal(h.diagonal(), share, shrinkage)
    if shrinkage != NONE:
        h.mul_(1 - shrinkage[0])
    h.diagonal().copy_(diagonal)
    return h


def _shrunk_diagonal(diagonal: Tensor, along: float) -> Tensor:
    """Return the diagonal that `shrunk` gives to its result. ``diagonal`` is the diagonal of H, ``[K]``."""
    alive = diagonal > 0
    mean = diagonal.sum() / alive.sum().clamp(min=1)
    return torch.where(alive, torch.lerp(diagonal, mean, along), diagonal)


def damped_diagonal(diagonal: Tensor, share: float, shrinkage: tuple[float, float] = NONE) -> Tensor:
    """Return the diagonal that `damped` gives to its result. ``diagonal`` is the diagonal of H, ``[K]``."""
    dead = diagonal <= 0
    number_alive = (~dead).sum()
    mean = torch.where(number_alive > 0, torch.where(dead, 0, diagonal).sum() / number_alive, 1)
    return torch.where(dead, mean, _shrunk_diagonal(diagonal, shrinkage[1]).add_(mean.double() * share))


def factor(h: Tensor, share: float, order: Tensor | None = None, shrinkage: tuple[float, float] = NONE) -> Factor:
    """Shrink a Hessian, damp it, and factor it.

    Args:
        h: H ``[K, K]``, float32 or float64. It must be symmetric. Its scale does not matter: H may be
            multiplied by any positive number.
        share: The damping λ as a share of the mean of the diagonal. After each failed attempt, the share is
            multiplied by 10. The result stores the final share.
        order: A permutation of the channels, ``[K]``. The permuted matrix is factored.
        shrinkage: As in `shrunk`.

    Raises:
        NonFiniteError: ``h`` contains NaN or Inf.
        SingularError: ``h`` is not positive definite even with the strongest damping.
    """
    backwards = None if order is None else order.flip(0)
    for attempt in range(1, ATTEMPTS + 1):
        # The upper triangular R with H = R Rᵀ is computed in three steps: rows and columns of H are reversed,
        # the Cholesky factor is computed, and its rows and columns are reversed.
        turned = h.flip(0, 1) if backwards is None else h.index_select(0, backwards).index_select(1, backwards)
        exact = turned.double() if attempt == ATTEMPTS else turned
        lower, failed = _cholesky(_damp_(exact, share, shrinkage))
        is_finite, has_failed = numbers(torch.isfinite(h.diagonal()).all(), failed)
        if not is_finite:
            raise NonFiniteError(
                "the Hessian of a layer's inputs contains NaN or Inf, because activations overflow during calibration. Use another dtype, "
                "or check the data",
                tensor="input",
            )
        if not has_failed:
            r = lower.flip(0, 1)  # [K, K]
            root = r.diagonal().clone()
            return Factor(r.div_(root), root.square_(), share, attempt).to(h.dtype)
        share = max(share, 1e-6) * 10
    raise SingularError(
        f"the Hessian of a layer's inputs [{h.shape[0]} channels] is not positive definite even with damping {share / 10:g}, because "
        f"there are too few calibration data, or they are degenerate. Give more sequences"
    )


def _cholesky(h: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower triangular matrix ``L [K, K]`` with ``L Lᵀ = h``, and a status number. The number is 0
    on success.

    The number is not 0 if ``h`` is not positive definite. ``h`` is overwritten.

    On a CPU, a matrix of more than two panels is factored panel by panel. The block at the corner of each
    panel is inverted, so that nearly all work is in matrix products. These are faster than LAPACK's
    factorization and triangular solves.
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
        for left in range(stop, h.shape[0], 2 * PANEL):  # update the lower half of the remaining square
            right = min(left + 2 * PANEL, h.shape[0])
            h[left:, left:right].addmm_(below[left - stop :], below[left - stop : right - stop].mT, alpha=-1)
    return h, failed


def largest_eigenvalue(h: Tensor, steps: int = 30) -> float:
    """Return an estimate of the largest eigenvalue of a positive semidefinite matrix ``h [K, K]``.

    The estimate comes from a power iteration. Its first vector is the diagonal of ``h``. The estimate may be
    slightly too small.
    """
    v = h.diagonal().clone()
    for _ in range(steps):
        v = v / v.norm().clamp(min=torch.finfo(h.dtype).tiny)
        v = h @ v
    return float(v.norm())


def percdamp_of(h: Tensor, share: float) -> float:
    """Convert a damping from a share of the largest eigenvalue of ``h`` to a share of the mean of the
    diagonal (percdamp).
    """
    mean = max(float(h.diagonal().mean()), torch.finfo(h.dtype).tiny)
    return share * largest_eigenvalue(h) / mean
