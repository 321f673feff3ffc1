"""GPTQ for formats that encode several columns together. Such a group of columns is called a vector.

Vectors are rounded one after another, and the error of each vector is compensated in later vectors (block
LDLQ, arXiv 2402.04396). ``H + λ I = A diag(d) Aᵀ`` is the factored Hessian; A is upper triangular with a
diagonal of ones. C is the block-diagonal part of A, with one block per vector. Then ``H + λ I = B M Bᵀ`` with
``B = A C⁻¹`` and ``M = C diag(d) Cᵀ``. B has identity blocks on its diagonal. M weights the part of a
vector's error that remains after all later columns have compensated it. So vector v is rounded from ``t_v =
w_v + Σ_u e_u B_uv``, a sum over earlier vectors u, as `quark_algos.gptq.gptq.ldlq` does for columns.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from quark_algos.gptq.damping import Factor
from quark_algos.gptq.swept import Swept

__all__ = ["by_vectors", "descending", "round_vectors"]


def descending(diagonal: Tensor, vector: int) -> Tensor:
    """Return the order of the channels, ``[K]``, by descending entries of the diagonal of H.

    The channels of a vector stay together. Vectors are sorted by the sum of their diagonal entries.
    """
    order = torch.argsort(diagonal.view(-1, vector).sum(1), descending=True, stable=True)
    return (order[:, None] * vector + torch.arange(vector, device=order.device)).flatten()


def by_vectors(factor: Factor, vector: int) -> Factor:
    """Return a factor in which ``a`` is B instead of A, and ``inner`` has the blocks of C.

    If each column is rounded alone (``vector`` is 1), return ``factor``.
    """
    if vector == 1:
        return factor
    k = factor.a.shape[0]
    inner = torch.diagonal(factor.a.view(k // vector, vector, -1, vector), dim1=0, dim2=2).permute(2, 0, 1).contiguous()
    columns = factor.a.view(k, -1, vector).transpose(0, 1)  # [K / v, K, v]
    a = torch.linalg.solve_triangular(inner, columns, upper=True, left=False, unitriangular=True)
    return attrs.evolve(factor, a=a.transpose(0, 1).reshape(k, k), inner=inner)


def round_vectors(base: Tensor, part: Tensor, factor: Factor, rounded: Callable[..., Tensor], done: Swept, start: int) -> None:
    """Round a block of columns. The block must consist of complete vectors.

    Args:
        base: The columns ``[block, N]``, in which the errors of all earlier columns are compensated. They are
            overwritten.
        part: The same columns of the original weight.
        factor: The result of `by_vectors`.
        rounded: The result of `quark.numbers.WeightGrid.rounder`.
        done: The values, errors and losses are written into this object.
        start: Number of the first column.
    """
    assert factor.inner is not None
    stop, vector = start + len(part), factor.inner.shape[1]
    e, q = done.e[start:stop], torch.empty_like(base)
    inside = factor.a[start:stop, start:stop].t().contiguous()  # [block, block], row k: factors of e for column k
    for first in range(0, len(part), vector):
        few = slice(first, first + vector)
        if first:
            base[few].addmm_(inside[few, :first], e[:first])
        number = (start + first) // vector
        metric = factor.inner[number] * factor.pivots[start:stop][few] @ factor.inner[number].t()
        torch.sub(part[few], rounded(base[few], start + first, q[few], metric), out=e[few])
    done.q[done.places(start, stop)] = q
    error = torch.bmm(factor.inner[start // vector : stop // vector].mT, base.sub_(q).view(-1, vector, base.shape[1]))
    done.loss.add_(torch.mv(error.flatten(0, 1).square_().t(), factor.pivots[start:stop]))
