"""Choose scales by what rounding with them does to the outputs: ``δ H_gg δᵀ`` for each row and group, δ its rounding error.

Ranges are shrunk, or stretched, by a few factors and the best one is kept, for each group by itself. Shrinking makes all steps finer and
cuts off the largest value. Stretching pays in formats with a gap below their largest value, FP4 above all with nothing between 4 and 6:
there the largest of a group may better become 4 ("four over six", arXiv 2512.02010). Source otherwise: spec of the algorithms, §1.1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quark.parallel import parallel_map, row_slices
from quark.quantizers import GroupScales, WeightGrid

STEP = 0.075
COARSE = tuple(1 - i * STEP for i in range(7))
"""Of ranges, from all of it down to a little more than half: the best of these and of `stretched` is found first, for each group."""
FINE = (-0.025, 0.025)
"""Then these are added to it."""
POWERS = (1.0, 0.5, 2.0)
"""In place of both where scales are powers of two."""
PATIENCE = 2
"""Scales that span rows are given up after as many factors that did good to none of them."""
NARROWEST = 0.05
"""Of ranges of scales that span rows."""
WIDEST = 256
"""Groups of more channels than this are compared by H's diagonal alone: products with whole blocks of it would cost more than solving."""
PIECE = 1 << 17
"""Weights that are worked on at a time, so that they stay in cache."""


def stretched(grid: WeightGrid) -> tuple[float, ...]:
    """Factors above 1: that with which the largest of a group comes to lie on the value below the format's largest, and some between."""
    steps = int((grid.gap - 1) / STEP + 0.5)
    return tuple(grid.gap - i * STEP for i in range(steps))


def search(wt: Tensor, grid: WeightGrid, h: Tensor | None) -> GroupScales:
    """Scales of all groups, each the best of several; where scales span rows, each by the errors of all that it spans.

    Args:
        wt: Wᵀ ``[m · group, N]``, float32; where scales span rows, all of it.
        grid: For it.
        h: H ``[m · group, m · group]`` of the same channels, of which the blocks on the diagonal count; None for plain squared errors.
    """
    weights = None if h is None else _weights(h, grid.group)
    if grid.spans is not None:
        return _search_spanning(wt, grid, grid.spans, weights)
    factors = stretched(grid)

    def search_rows(rows: slice) -> GroupScales:
        return _search_rows(wt[:, rows].contiguous(), rows, grid, weights, factors)

    return GroupScales.beside(parallel_map(search_rows, _pieces(wt), wt.device))


def _pieces(wt: Tensor) -> list[slice]:
    """Rows that are worked on at a time."""
    return row_slices(wt.shape[1], wt.shape[0], PIECE)


class _Best:
    """The best factors so far, of any shape, and their losses.

    Args:
        loss: Of factors, each by itself.
        like: In the factors' shape.
    """

    def __init__(self, loss: Callable[[Tensor], Tensor], like: Tensor) -> None:
        self._loss = loss
        self.factor = torch.ones_like(like)
        self.least = loss(self.factor)

    def attempt(self, factor: Tensor) -> Tensor:
        """Take those factors that are better, and say which are."""
        loss = self._loss(factor)
        better = loss < self.least
        self.least, self.factor = torch.where(better, loss, self.least), torch.where(better, factor, self.factor)
        return better


def _search_rows(w: Tensor, rows: slice, grid: WeightGrid, weights: Tensor | None, stretched: tuple[float, ...]) -> GroupScales:
    low, high = grid.ranges(w, rows)
    room = torch.empty_like(w)

    def scales_of(factor: Tensor) -> GroupScales:
        return grid.scales_of_ranges(low * factor, high * factor, rows)

    best = _Best(lambda factor: _loss(w, grid, scales_of(factor), weights, room), low)
    in_powers = _is_power_of_two(scales_of(best.factor).scale)
    for factor in POWERS[1:] if in_powers else (*COARSE[1:], *stretched):
        best.attempt(torch.full_like(low, factor))
    centre = best.factor
    for step in () if in_powers else FINE:
        best.attempt(centre + step)
    return scales_of(best.factor)


def _search_spanning(wt: Tensor, grid: WeightGrid, spans: Tensor, weights: Tensor | None) -> GroupScales:
    """One outlier may have made a range many times too wide: ranges are shrunk as long as that does good to any."""

    def loss_of(factor: Tensor) -> Tensor:
        scales = grid.spanning(factor)

        def loss_of_rows(rows: slice) -> Tensor:
            w = wt[:, rows].contiguous()
            return _loss(w, grid, scales.of_rows(rows), weights, torch.empty_like(w))

        parts = parallel_map(loss_of_rows, _pieces(wt), wt.device)
        return torch.zeros_like(factor).index_add_(0, spans.flatten(), torch.cat(parts, 1).flatten())

    best = _Best(loss_of, wt.new_ones(int(spans.max()) + 1))
    for factor in stretched(grid):
        best.attempt(torch.full_like(best.factor, factor))
    factor, in_vain = 1.0, 0
    while in_vain < PATIENCE and factor > NARROWEST:
        factor *= 1 - STEP
        in_vain = 0 if bool(best.attempt(torch.full_like(best.factor, factor)).any()) else in_vain + 1
    return grid.spanning(best.factor)


def _loss(w: Tensor, grid: WeightGrid, scales: GroupScales, weights: Tensor | None, room: Tensor) -> Tensor:
    """The weighted squared error of each group of each row, ``[m, n]``."""
    error = grid.round_(room.copy_(w), grid.with_subscales(w, scales)).sub_(w).view(-1, grid.group, w.shape[1])  # [m, g, n]
    if weights is None:
        return error.square_().sum(1)
    if weights.ndim == 2:
        return error.square_().mul_(weights[:, :, None]).sum(1)
    return torch.bmm(weights, error).mul_(error).sum(1)


def _weights(h: Tensor, group: int) -> Tensor:
    """The blocks of H on its diagonal, ``[m, g, g]``, or where groups are wide, its diagonal, ``[m, g]``."""
    if group > WIDEST:
        return h.diagonal().reshape(-1, group)
    blocks = h.reshape(h.shape[0] // group, group, -1, group)
    return torch.diagonal(blocks, dim1=0, dim2=2).permute(2, 0, 1).contiguous()


def _is_power_of_two(scale: Tensor) -> bool:
    return bool((torch.frexp(scale)[0] == 0.5).all())
