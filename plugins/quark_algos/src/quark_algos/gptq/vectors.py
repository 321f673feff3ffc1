"""GPTQ for formats that round several columns together: a vector at a time, with feedback after each.

``H + λ I = A diag(d) Aᵀ``, A unit upper triangular. Let C be block-diagonal, with the unit triangle of A for
each vector. Then ``H + λ I = B M Bᵀ``: ``B = A C⁻¹`` has identity blocks on its diagonal, and
``M = C diag(d) Cᵀ`` weighs the error of a vector after all later columns compensate it. So a vector becomes
``t_v = w_v + Σ_u e_u B_uv`` over the vectors u before it, as `quark_algos.gptq.gptq.ldlq` has it for columns
(block LDLQ, arXiv 2402.04396).
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
    """Return the channels ``[K]`` by descending diagonal of H; vectors stay whole, and their sums count."""
    order = torch.argsort(diagonal.view(-1, vector).sum(1), descending=True, stable=True)
    return (order[:, None] * vector + torch.arange(vector, device=order.device)).flatten()


def by_vectors(factor: Factor, vector: int) -> Factor:
    """Return the factor B with the triangles C as its ``inner``; ``factor`` itself for single columns."""
    if vector == 1:
        return factor
    k = factor.a.shape[0]
    inner = torch.diagonal(factor.a.view(k // vector, vector, -1, vector), dim1=0, dim2=2).permute(2, 0, 1).contiguous()
    columns = factor.a.view(k, -1, vector).transpose(0, 1)  # [K / v, K, v]
    a = torch.linalg.solve_triangular(inner, columns, upper=True, left=False, unitriangular=True)
    return attrs.evolve(factor, a=a.transpose(0, 1).reshape(k, k), inner=inner)


def round_vectors(base: Tensor, part: Tensor, factor: Factor, rounded: Callable[..., Tensor], done: Swept, start: int) -> None:
    """Round the columns from ``start`` on, which are whole vectors.

    Args:
        base: The columns ``[block, N]``, corrected for the errors of all before them; overwritten.
        part: The columns of the weight.
        factor: The result of `by_vectors`.
        rounded: As `quark.numbers.WeightGrid.rounder` returns it.
        done: Gets values, errors and losses.
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
