"""LDLQ, which is GPTQ: columns are rounded one after another, each in view of the errors of those before it.

A column becomes ``t_k = w_k + Σ_j e_j A_jk`` over the columns j before it, with the weight w, the errors e so
far and the factor A. The contribution of earlier blocks of columns is one matrix product, inside of a block
there is a smaller product for every few columns, and each column then takes a handful of operations on one
row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import call

import attrs
import torch
from torch import Tensor

from quark.base.parallel import one_thread, parallel_map, row_slices
from quark.numbers import ColumnRounder, GroupScales, WeightGrid
from quark.numbers.kernels import uses_kernels
from quark_algos.gptq.damping import Factor

__all__ = ["BLOCK", "FEW", "SLICE", "Chooser", "Rounder", "Swept", "ldlq", "ldlq_by_rows", "ldlq_choosing"]

BLOCK = 128
"""Columns between two products with all columns before them."""
FEW = 16
"""Columns between two products inside a block."""
SLICE = 4096
"""Rows of a weight that one thread sweeps over: with fewer, threads would mostly wait for each other to call
operations from Python.
"""
WIDE = 4096
"""Columns of a weight above which products with the columns before a block outweigh that, so that a slice has
fewer rows, in proportion.
"""

MOST_COLUMNS = 256
"""Columns of the largest block that a kernel takes: its part of 8 rows is held in registers, 64 of each
thread.
"""

Rounder = Callable[[Tensor, int, Tensor], Tensor]
"""Rounds ``t [N]``, the column of that number, into the third argument, and returns it: as
`WeightGrid.rounder` does.
"""
Chooser = Callable[[Tensor, int], GroupScales]


@attrs.frozen(eq=False)
class Swept:
    """A weight whose columns are rounded.

    Attributes:
        q: Qᵀ ``[K, N]``, its channels in their own order.
        e: Eᵀ ``[K, N]``, in the order in which they were rounded.
        loss: ``Σ_k d_k (t_k − q_k)²``, which is ``tr(E (H + λ I) Eᵀ)`` of each row ``[N]``.
        order: That order ``[K]``, or None for their own.
        t: Tᵀ ``[K, N]``, what was rounded, in that order; with ``causal`` alone.
        causal: As of `ldlq`.
    """

    q: Tensor
    e: Tensor
    loss: Tensor
    order: Tensor | None = None
    t: Tensor | None = None
    causal: Tensor | None = None

    @classmethod
    def room_for(cls, wt: Tensor, order: Tensor | None = None, causal: Tensor | None = None) -> Swept:
        """Return room for a result of the shape of Wᵀ, with nothing rounded yet."""
        t = None if causal is None else torch.empty_like(wt)
        return cls(torch.empty_like(wt), torch.empty_like(wt), wt.new_zeros(wt.shape[1]), order, t, causal)

    @classmethod
    def beside(cls, parts: Sequence[Swept]) -> Swept:
        """Return consecutive slices of the rows as one result; all were rounded in the same order."""
        if len(parts) == 1:
            return parts[0]
        q, e, loss = (torch.cat([getattr(part, name) for part in parts], -1) for name in ("q", "e", "loss"))
        return cls(q, e, loss, parts[0].order)

    def places(self, start: int, stop: int) -> slice | Tensor:
        """Return where the columns that are rounded from ``start`` to ``stop`` are in Q and W."""
        return slice(start, stop) if self.order is None else self.order[start:stop]


def ldlq(
    wt: Tensor, factor: Factor, rounded: Rounder, block: int = BLOCK, order: Tensor | None = None, causal: Tensor | None = None
) -> Swept:
    """Round column after column.

    ``t_k = w_k + Σ_{j<k} (w_j − q_j) A_jk``, and ``q_k`` is the nearest value of the grid to that.

    Errors are always against the original weight, which is not changed. The codes are those of GPTQ with the
    same damping and order.

    Args:
        wt: Wᵀ ``[K, N]``, float.
        factor: Of H, its channels in the order to be rounded in.
        rounded: As `WeightGrid.rounder` returns it, for that order.
        block: Columns of a block; the result depends on it in the last bits alone.
        order: A permutation of the channels ``[K]``; None for their own order.
        causal: P ``[K, K]``, strictly upper, in that order: ``w_k + Σ_{j<k} t_j P_jk`` takes the place of the
            weight ``w_k``.
    """
    done = Swept.room_for(wt, order, causal)
    with one_thread(wt.device):
        for start in range(0, wt.shape[0], block):
            stop = min(start + block, wt.shape[0])
            part = _weight(wt[done.places(start, stop)], done, start)
            _round_block(_begun(part, factor, done, start), part, factor, rounded, done, start)
    return done


def ldlq_by_rows(
    wt: Tensor,
    factor: Factor,
    grid: WeightGrid,
    scales: GroupScales,
    block: int = BLOCK,
    order: Tensor | None = None,
    causal: Tensor | None = None,
    order_on_host: Sequence[int] | None = None,
) -> Swept:
    """Run `ldlq` under the ``scales`` that `WeightGrid.with_subscales` returns.

    Slices of many rows run in threads of their own.

    ``order_on_host`` is ``order`` as a list, for whoever has it already: it is read from the device else.
    """
    sweeps = []
    for rows in row_slices(wt.shape[1], max(wt.shape[0], WIDE), SLICE * WIDE) if wt.device.type == "cpu" else [slice(0, wt.shape[1])]:
        rounded = grid.rounder(scales.of_rows(rows), order, order_on_host=order_on_host)
        sweeps.append(partial(ldlq, wt[:, rows], factor, rounded, block, order, causal))
    return Swept.beside(parallel_map(call, sweeps, wt.device))


def ldlq_choosing(wt: Tensor, factor: Factor, grid: WeightGrid, choose: Chooser, causal: Tensor | None = None) -> tuple[Swept, GroupScales]:
    """Run `ldlq` with the scales of a group chosen when its first column is reached.

    They come from the values that its columns are to become.

    Args:
        wt, factor, causal: As of `ldlq`, the channels in their own order.
        grid: Of ``wt``, with ``grid.fixed`` None.
        choose: Returns the scales of the group ``t [group, N]`` of that number.

    Returns:
        The rounded weight, and the scales of all groups.
    """
    done = Swept.room_for(wt, causal=causal)
    found = []
    for start in range(0, wt.shape[0], grid.group):
        part = _weight(wt[start : start + grid.group], done, start)
        base = _begun(part, factor, done, start)
        scales = choose(base, start // grid.group)
        found.append(scales)
        spread = grid.with_subscales(base, scales) if grid.has_subscales else scales.expanded(grid.group)
        with one_thread(wt.device):
            _round_block(base, part, factor, grid.rounder(spread, first=start), done, start)
    return done, GroupScales.joined(found)


def _weight(part: Tensor, done: Swept, start: int) -> Tensor:
    """Return the weight's columns from ``start`` on ``[block, N]``, corrected for earlier blocks.

    The correction is what earlier blocks add to them by the causal matrix.
    """
    if done.causal is None or done.t is None:
        return part
    return torch.addmm(part, done.causal[:start, start : start + part.shape[0]].t(), done.t[:start])


def _begun(part: Tensor, factor: Factor, done: Swept, start: int) -> Tensor:
    """Return a copy of the columns ``part [block, N]``, corrected.

    The correction is for the errors of all columns before them.
    """
    stop = start + part.shape[0]
    return torch.addmm(part, factor.a[:start, start:stop].t(), done.e[:start]) if start else part.clone()


def _round_block(base: Tensor, part: Tensor, factor: Factor, rounded: Rounder, done: Swept, start: int) -> None:
    """Round the columns from ``start`` on.

    ``base [block, N]`` is ``part`` as `_begun` returns it, and is overwritten.
    """
    a, e = factor.a, done.e[start : start + part.shape[0]]  # [block, N]
    if (rounder := _rounder_of_kernel(rounded, base)) is not None:
        _round_block_by_kernel(rounder, base, part, factor, done, start)
        return
    q = torch.empty_like(base)
    e.zero_()  # so that a product may include columns that are not rounded yet: views of those that are would cost more than it does
    inside = a[start : start + len(part), start : start + len(part)].t().contiguous()  # [block, block], row k: what column k takes of e
    columns = zip(base.unbind(0), part.unbind(0), q.unbind(0), e.unbind(0), strict=True)
    for first in range(0, len(part), FEW):
        few = slice(first, min(first + FEW, len(part)))
        if first:
            base[few].addmm_(inside[few, :first], e[:first])
        errors = e[few].t()
        for k, factors in enumerate(inside[few, few].unbind(0), start + first):
            t, weight, value, error = next(columns)
            if k > start + first:
                t.addmv_(errors, factors)
            if done.causal is not None and done.t is not None:
                added = torch.mv(done.t[start:k].t(), done.causal[start:k, k])
                weight += added
                done.t[k] = t.add_(added)
            torch.sub(weight, rounded(t, k, value), out=error)
    done.q[done.places(start, start + len(part))] = q
    done.loss.add_(torch.mv(base.sub_(q).square_().t(), factor.pivots[start : start + len(part)]))


def _rounder_of_kernel(rounded: Rounder, base: Tensor) -> ColumnRounder | None:
    """Return ``rounded`` if a kernel rounds the block ``base`` with it; None where torch's operations do."""
    if not uses_kernels(base.device) or not isinstance(rounded, ColumnRounder) or base.dtype is not torch.float32:
        return None
    return rounded if len(base) <= MOST_COLUMNS and rounded.device_code is not None else None


def _round_block_by_kernel(rounder: ColumnRounder, base: Tensor, part: Tensor, factor: Factor, done: Swept, start: int) -> None:
    """Round a block as `_round_block` does, by one kernel."""
    from quark_algos.gptq.column_kernel import Feedback, round_columns

    block = slice(start, start + len(part))
    feedback = Feedback(
        of_errors=factor.a[block, block],
        causal=None if done.causal is None else done.causal[block, block],
        t=None if done.t is None else done.t[block],
        pivots=factor.pivots[block],
        loss=done.loss,
    )
    round_columns(rounder, base, part, feedback, start, done.q, done.e[block])
