"""Search scales by output error: ``δ H_gg δᵀ`` for each row and group, with the rounding error δ.

A rounding that compensates errors in other columns also handles correlations, so it uses only the diagonal of
H_gg.

Ranges are shrunk, or stretched, by a few factors, and the best of each group is taken. Shrinking makes all
steps finer and cuts off the largest value. Stretching helps formats with a gap below their largest value,
above all FP4, which has no value between 4 and 6: rounding the largest value of a group to 4 is sometimes
better ("four over six", arXiv 2512.02010).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from quark.base.parallel import parallel_map, row_slices
from quark.numbers import GroupScales, WeightGrid

__all__ = [
    "COARSE",
    "FINE",
    "LARGE_PIECE",
    "NARROWEST",
    "PATIENCE",
    "PIECE",
    "POWERS",
    "STEP",
    "TO_A_QUARTER",
    "WIDEST",
    "group_moments",
    "search",
    "stretched",
]

STEP = 0.075
COARSE = tuple(1 - i * STEP for i in range(7))
"""Factors of a range, from 1 to slightly above 0.5: the first search takes the best of these and of
`stretched`.
"""
TO_A_QUARTER = tuple(1 - i * STEP for i in range(11))
"""Factors down to 0.25, for roundings that compensate errors: a finer step may be worth more than the largest
weights if their inputs are small.
"""
FINE = (-0.025, 0.025)
"""Offsets from the best factor of the first search, for the second search."""
POWERS = (1.0, 0.5, 2.0)
"""Factors for power-of-two scales, which replace both searches."""
PATIENCE = 2
"""The search of scales that span rows ends after this many factors without improvement."""
NARROWEST = 0.05
"""The smallest factor of the ranges of scales that span rows."""
WIDEST = 256
"""Wider groups use only H's diagonal: blocks of H would cost more than the column loop.
"""
PIECE = 1 << 20
"""Weights that a thread works on at a time.

With a quarter of it, calls and group scales take 50 % longer. A larger piece would exceed the shared cache,
and few layers would have work for two threads.
"""
LARGE_PIECE = 1 << 26
"""Weights per step on devices other than the CPU, 256 MiB in float32."""


def stretched(grid: WeightGrid) -> tuple[float, ...]:
    """Return factors above 1.

    The largest factor scales a group's largest value to the second largest value of the format.
    """
    steps = int((grid.gap - 1) / STEP + 0.5)
    return tuple(grid.gap - i * STEP for i in range(steps))


def group_moments(h: Tensor, group: int) -> Tensor:
    """Return a copy of the blocks on the diagonal of ``h [m · group, m · group]``, ``[m, group, group]``.

    For groups wider than `WIDEST`, return only the diagonal, ``[m, group]``.
    """
    if group > WIDEST:
        return h.diagonal().reshape(-1, group).clone()
    blocks = h.reshape(h.shape[0] // group, group, -1, group)
    return torch.diagonal(blocks, dim1=0, dim2=2).permute(2, 0, 1).clone(memory_format=torch.contiguous_format)


def search(wt: Tensor, grid: WeightGrid, moments: Tensor | None, coarse: Sequence[float] = COARSE) -> GroupScales:
    """Return the best of several scales for each group.

    Scales that span rows are compared over all their groups.

    Args:
        wt: Wᵀ ``[m · group, N]``, float32; all channels if scales span rows.
        grid: Grid of ``wt``.
        moments: H of the same channels: its blocks ``[m, group, group]``, as in `group_moments`, or its
            diagonal ``[m, group]``; None for squared errors.
        coarse: Factors for the first search, starting with 1.
    """
    if grid.spans is not None:
        return _search_spanning(wt, grid, grid.spans, moments)
    factors, in_powers = stretched(grid), grid.has_powers_of_two

    search_rows = partial(_search_rows, wt, grid, moments, POWERS[1:] if in_powers else (*coarse[1:], *factors), in_powers)
    return GroupScales.beside(parallel_map(search_rows, _pieces(wt), wt.device))


def _pieces(wt: Tensor) -> list[slice]:
    """Return the slices of rows for threads."""
    return row_slices(wt.shape[1], wt.shape[0], PIECE if wt.device.type == "cpu" else LARGE_PIECE)


class _Best:
    """The best factors so far, of any shape, and their losses.

    Args:
        loss: Returns the loss of each factor.
        like: A tensor of the factors' shape.
    """

    def __init__(self, loss: Callable[[Tensor], Tensor], like: Tensor) -> None:
        self._loss = loss
        self.factor = torch.ones_like(like)
        self.least = loss(self.factor)

    def attempt(self, factor: Tensor, where: Tensor | None = None) -> Tensor:
        """Keep factors that improve the loss, only if ``where`` holds.

        Returns a bool mask of improvements.
        """
        loss = self._loss(factor)
        better = loss < self.least if where is None else (loss < self.least) & where
        self.least, self.factor = torch.where(better, loss, self.least), torch.where(better, factor, self.factor)
        return better


def _search_rows(
    wt: Tensor, grid: WeightGrid, moments: Tensor | None, factors: tuple[float, ...], in_powers: bool, rows: slice
) -> GroupScales:
    """Return the best scales of some rows.

    It tries ``factors`` first, then factors near the best unless scales are powers of two.
    """
    w, grid = wt[:, rows].contiguous(), grid.of_rows(rows)
    low, high = grid.ranges(w)
    scratch = torch.empty_like(w)

    def scales_of(factor: Tensor) -> GroupScales:
        return grid.scales_of_ranges(low * factor, high * factor)

    best = _Best(lambda factor: _loss(w, grid, scales_of(factor), moments, scratch), low)
    for factor in factors:
        best.attempt(torch.full_like(low, factor))
    centre = best.factor
    for step in () if in_powers else FINE:
        best.attempt(centre + step)
    return scales_of(best.factor)


def _search_spanning(wt: Tensor, grid: WeightGrid, spans: Tensor, moments: Tensor | None) -> GroupScales:
    """Shrink ranges while any of them improves.

    One outlier can make a range many times too wide.
    """

    def loss_of(factor: Tensor) -> Tensor:
        scales = grid.spanning(factor)

        def loss_of_rows(rows: slice) -> Tensor:
            w = wt[:, rows].contiguous()
            return _loss(w, grid, scales.of_rows(rows), moments, torch.empty_like(w))

        parts = parallel_map(loss_of_rows, _pieces(wt), wt.device)
        return torch.zeros_like(factor).index_add_(0, spans.flatten(), torch.cat(parts, 1).flatten())

    best = _Best(loss_of, wt.new_ones(grid.number_of_spans))
    for factor in stretched(grid):
        best.attempt(torch.full_like(best.factor, factor))
    factor, failures = 1.0, torch.zeros((), dtype=torch.int32, device=wt.device)
    # Only a CPU reads the flag: on other devices reading it takes longer than a search. They try all factors,
    # and ignore factors after the end.
    while factor > NARROWEST and not (wt.device.type == "cpu" and int(failures) >= PATIENCE):
        factor *= 1 - STEP
        better = best.attempt(torch.full_like(best.factor, factor), failures < PATIENCE)
        failures = torch.where(better.any(), 0, failures + 1)
    return grid.spanning(best.factor)


def _loss(w: Tensor, grid: WeightGrid, scales: GroupScales, moments: Tensor | None, scratch: Tensor) -> Tensor:
    """Return the weighted squared error of each group of each row, ``[m, n]``."""
    error = grid.error(w, grid.with_subscales(w, scales), scratch).view(-1, grid.group, w.shape[1])  # [m, g, n]
    if moments is None:
        return error.square_().sum(1)
    if moments.ndim == 2:
        return error.square_().mul_(moments[:, :, None]).sum(1)
    return torch.bmm(moments, error).mul_(error).sum(1)
