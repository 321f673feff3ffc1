"""Sweeps over the columns of a weight, each rounded in view of the errors of the others: LDLQ, which is GPTQ, and coordinate descent.

Both take a column to ``t_k = b_k + Σ_j V_j M_jk`` over the columns j before it: in LDLQ b is the weight, V the errors so far and M the
factor; in descent b holds what all columns say and V their changes. Columns are worked in blocks: what earlier blocks say is one matrix
product, and inside a block a smaller one for each few columns, so that a single column is left with a handful of operations on one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs
import torch
from torch import Tensor

from quark.quantizers import GroupScales, WeightGrid
from quark_algos.gptq.damping import Factor

BLOCK = 128
"""Columns between two products with all that went before."""
FEW = 16
"""Columns between two products inside a block."""

Rounder = Callable[[Tensor, int], Tensor]
Chooser = Callable[[Tensor, int], GroupScales]


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """On processors, work in this thread alone while the body runs: a row is too short for threads to gain what they lose in waiting."""
    before = torch.get_num_threads()
    if device.type != "cpu" or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
        """Of the shape of Wᵀ, nothing rounded yet."""
        t = None if causal is None else torch.empty_like(wt)
        return cls(torch.empty_like(wt), torch.empty_like(wt), wt.new_zeros(wt.shape[1]), order, t, causal)

    def e_in_place(self) -> Tensor:
        """Eᵀ with its channels in their own order."""
        if self.order is None:
            return self.e
        own = torch.empty_like(self.e)
        own[self.order] = self.e
        return own

    def where(self, better: Tensor, other: Swept) -> Swept:
        """This, but the other's rows where ``better [N]`` says so; both were rounded in one order."""
        q, e, loss = (torch.where(better, b, a) for a, b in ((self.q, other.q), (self.e, other.e), (self.loss, other.loss)))
        return Swept(q, e, loss, self.order)

    def places(self, start: int, stop: int) -> slice | Tensor:
        """Where the columns that are rounded from ``start`` to ``stop`` lie in Q and W."""
        return slice(start, stop) if self.order is None else self.order[start:stop]


def ldlq(
    wt: Tensor, factor: Factor, rounded: Rounder, block: int = BLOCK, order: Tensor | None = None, causal: Tensor | None = None
) -> Swept:
    """Round column after column: ``t_k = w_k + Σ_{j<k} (w_j − q_j) A_jk``, and ``q_k`` is the nearest value of the grid to that.

    Errors are always against the original weight, which is not changed. The codes are those of GPTQ with the same damping and order.

    Args:
        wt: Wᵀ ``[K, N]``, float.
        factor: Of H, its channels in the order to be rounded in.
        rounded: Of `WeightGrid.rounder`, for that order.
        block: Columns of a block; the result depends on it in the last bits alone.
        order: A permutation of the channels ``[K]``; None for their own order.
        causal: P ``[K, K]``, strictly upper, in that order: ``w_k + Σ_{j<k} t_j P_jk`` takes the place of the weight ``w_k``.
    """
    done = Swept.room_for(wt, order, causal)
    for start in range(0, wt.shape[0], block):
        stop = min(start + block, wt.shape[0])
        part = _weight(wt[done.places(start, stop)], done, start)
        _round_block(_begun(part, factor, done, start), part, factor, rounded, done, start)
    return done


def ldlq_choosing(
    wt: Tensor, factor: Factor, grid: WeightGrid, choose: Chooser, causal: Tensor | None = None
) -> tuple[Swept, GroupScales, GroupScales]:
    """`ldlq`, with the scales of a group chosen when its first column is reached, from what its columns are to become.

    Args:
        wt, factor, causal: As of `ldlq`, the channels in their own order.
        grid: With ``grid.fixed`` None.
        choose: Gives the scales of the group ``t [group, N]`` of that number.

    Returns:
        What was rounded; the scales of all groups; the same as the rounder wants them.
    """
    done = Swept.room_for(wt, causal=causal)
    found, spread = [], []
    for start in range(0, wt.shape[0], grid.group):
        part = _weight(wt[start : start + grid.group], done, start)
        base = _begun(part, factor, done, start)
        scales = choose(base, start // grid.group)
        found.append(scales)
        spread.append(grid.with_subscales(base, scales) if grid.has_subscales else scales.expanded(grid.group))
        _round_block(base, part, factor, _from(spread[-1], grid, start), done, start)
    return done, GroupScales.joined(found), GroupScales.joined(spread)


def _from(scales: GroupScales, grid: WeightGrid, start: int) -> Rounder:
    """A rounder of the columns from ``start`` on; ``scales`` have a row for each."""
    return lambda t, k: grid.round_(t, scales.at(k - start))


def _weight(part: Tensor, done: Swept, start: int) -> Tensor:
    """The weight's columns from ``start`` on ``[block, N]``, with what earlier blocks add to them by the causal matrix."""
    if done.causal is None or done.t is None:
        return part
    return torch.addmm(part, done.causal[:start, start : start + part.shape[0]].t(), done.t[:start])


def _begun(part: Tensor, factor: Factor, done: Swept, start: int) -> Tensor:
    """The columns ``part [block, N]`` as all columns before them leave them; a tensor of one's own."""
    stop = start + part.shape[0]
    return torch.addmm(part, factor.a[:start, start:stop].t(), done.e[:start]) if start else part.clone()


def _round_block(base: Tensor, part: Tensor, factor: Factor, rounded: Rounder, done: Swept, start: int) -> None:
    """Round the columns from ``start`` on, ``base [block, N]`` being what earlier blocks have made of ``part``; it is used up."""
    a, e = factor.a, done.e
    stop = start + part.shape[0]
    q = torch.empty_like(base)
    with one_thread(base.device):
        for few in range(start, stop, FEW):
            last = min(few + FEW, stop)
            if few > start:
                base[few - start : last - start].addmm_(a[start:few, few:last].t(), e[start:few])
            for k in range(few, last):
                t, value = base[k - start], q[k - start]
                if k > few:
                    t.addmv_(e[few:k].t(), a[few:k, k])
                if done.causal is not None and done.t is not None:
                    added = torch.mv(done.t[start:k].t(), done.causal[start:k, k])
                    part[k - start] += added
                    done.t[k] = t.add_(added)
                torch.sub(part[k - start], rounded(value.copy_(t), k), out=e[k])
    done.q[done.places(start, stop)] = q
    done.loss.add_(torch.mv(base.sub_(q).square_().t(), factor.pivots[start:stop]))


def descend(done: Swept, h: Tensor, rounded: Rounder) -> bool:
    """One sweep of coordinate descent, in place: each column to the best value the grid has, all others being as they are.

    ``q_k ← nearest(q_k + (E H)_k / H_kk)``; the objective ``tr(E H Eᵀ)`` never grows.

    Args:
        done: What `ldlq` has left; its ``loss`` stays what it was.
        h: ``H + λ I [K, K]``, in the same order.
        rounded: Of `WeightGrid.rounder`, likewise.

    Returns:
        Whether anything has changed.
    """
    weights = h / h.diagonal()  # [K, K], column k by H_kk
    e, changed = done.e, False
    for start in range(0, e.shape[0], BLOCK):
        stop = min(start + BLOCK, e.shape[0])
        q = done.q[done.places(start, stop)].clone()
        base = torch.addmm(q, weights[:, start:stop].t(), e)
        change = torch.empty_like(base)  # of E
        with one_thread(base.device):
            for few in range(start, stop, FEW):
                last = min(few + FEW, stop)
                if few > start:
                    base[few - start : last - start].addmm_(weights[start:few, few:last].t(), change[: few - start])
                for k in range(few, last):
                    t = base[k - start]
                    if k > few:
                        t.addmv_(change[few - start : k - start].t(), weights[few:k, k])
                    torch.sub(q[k - start], rounded(t, k), out=change[k - start])
                    q[k - start] = t
        e[start:stop] += change
        done.q[done.places(start, stop)] = q
        changed = changed or bool(change.any())
    return changed
