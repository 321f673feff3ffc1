"""Functions that search, for each group of weights, the scale with the smallest output error.

The output error of a group g in one row is ``δ H_gg δᵀ``. δ is the rounding error of the group, and H_gg is
the block of the Hessian for the channels of the group. A rounding algorithm that compensates errors in other
columns already takes correlations into account, so it uses only the diagonal of H_gg.

The range of each group is multiplied by several factors, and the best factor of each group is chosen. A
factor below 1 makes all steps finer and clips the largest values. A factor above 1 helps formats that have a
gap below their largest value. The main example is FP4, which has no value between 4 and 6. It is sometimes
better to round the largest value of a group to 4 instead of 6 ("four over six", arXiv 2512.02010).
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
"""Factors of a range, from 1 to slightly above 0.5. The first search chooses the best of these factors and of
`stretched`.
"""
TO_A_QUARTER = tuple(1 - i * STEP for i in range(11))
"""Factors of a range, from 1 to 0.25, for roundings that compensate errors. If the inputs of the largest
weights are small, it may be better to clip these weights and to have finer steps.
"""
FINE = (-0.025, 0.025)
"""The second search adds these offsets to the best factor of the first search."""
POWERS = (1.0, 0.5, 2.0)
"""Factors of a range for scales that are powers of two. They are tried instead of both searches."""
PATIENCE = 2
"""If scales span rows, the search ends after this many factors without an improvement."""
NARROWEST = 0.05
"""If scales span rows, this is the smallest factor of a range."""
WIDEST = 256
"""For groups with more channels, only the diagonal of H is used. With blocks of H, the search would take
longer than the rounding of the columns.
"""
PIECE = 1 << 20
"""Number of weights that a thread processes at a time.

With a quarter of this number, the search takes 50 % longer. With a larger number, a piece would not fit into
the shared cache, and few layers would have enough weights for two threads.
"""
LARGE_PIECE = 1 << 26
"""Number of weights that are processed at a time on devices other than the CPU. They need 256 MiB in
float32.
"""


def stretched(grid: WeightGrid) -> tuple[float, ...]:
    """Return the factors above 1 by which the ranges of groups are multiplied.

    With the largest factor, the largest value of a group is rounded to the second largest value of the
    format.
    """
    steps = int((grid.gap - 1) / STEP + 0.5)
    return tuple(grid.gap - i * STEP for i in range(steps))


def group_moments(h: Tensor, group: int) -> Tensor:
    """Return the blocks on the diagonal of a Hessian as a new tensor ``[m, group, group]``.

    For groups with more than `WIDEST` channels, return only the diagonal, ``[m, group]``.

    Args:
        h: H ``[m · group, m · group]``.
        group: Number of channels of a group.
    """
    if group > WIDEST:
        return h.diagonal().reshape(-1, group).clone()
    blocks = h.reshape(h.shape[0] // group, group, -1, group)
    return torch.diagonal(blocks, dim1=0, dim2=2).permute(2, 0, 1).clone(memory_format=torch.contiguous_format)


def search(wt: Tensor, grid: WeightGrid, moments: Tensor | None, coarse: Sequence[float] = COARSE) -> GroupScales:
    """Try several scales for each group, and return the scales with the smallest error.

    If several rows share a scale, the error of the scale is the sum over all groups that use it.

    Args:
        wt: Wᵀ ``[m · group, N]``, float32. If rows share scales, ``wt`` must have all channels.
        grid: The quantization grid of ``wt``.
        moments: The blocks on the diagonal of the Hessian H of the same channels, ``[m, group, group]`` (see
            `group_moments`), or only the diagonal of H, ``[m, group]``. If ``moments`` is None, the error is
            the squared error of the weights.
        coarse: Factors for the first search. The first factor is 1.
    """
    if grid.spans is not None:
        return _search_spanning(wt, grid, grid.spans, moments)
    factors, in_powers = stretched(grid), grid.has_powers_of_two

    search_rows = partial(_search_rows, wt, grid, moments, POWERS[1:] if in_powers else (*coarse[1:], *factors), in_powers)
    return GroupScales.beside(parallel_map(search_rows, _pieces(wt), wt.device))


def _pieces(wt: Tensor) -> list[slice]:
    """Return slices of the rows of W. Each slice will be searched in its own thread."""
    return row_slices(wt.shape[1], wt.shape[0], PIECE if wt.device.type == "cpu" else LARGE_PIECE)


class _Best:
    """Stores the best factors that have been tried so far, and the losses of these factors.

    Args:
        loss: A function that returns the loss for each factor in a tensor.
        like: A tensor with the shape of the factors.
    """

    def __init__(self, loss: Callable[[Tensor], Tensor], like: Tensor) -> None:
        self._loss = loss
        self.factor = torch.ones_like(like)
        self.least = loss(self.factor)

    def attempt(self, factor: Tensor, where: Tensor | None = None) -> Tensor:
        """Try new factors, and store the factors that improve the loss.

        If ``where`` is given, only factors for which it is True are stored.

        Return a mask of the factors that were stored.
        """
        loss = self._loss(factor)
        better = loss < self.least if where is None else (loss < self.least) & where
        self.least, self.factor = torch.where(better, loss, self.least), torch.where(better, factor, self.factor)
        return better


def _search_rows(
    wt: Tensor, grid: WeightGrid, moments: Tensor | None, factors: tuple[float, ...], in_powers: bool, rows: slice
) -> GroupScales:
    """Return the best scales for some rows.

    The function tries ``factors`` first. Then it tries factors near the best factor, except if scales are
    powers of two (``in_powers``).
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
    """Return the best scales for a granularity in which rows share scales.

    Ranges are reduced again and again as long as the error of at least one scale improves, because a single
    outlier can make a range many times too wide.
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
    # The number of failures is read only on a CPU. On other devices, reading it would take longer than a
    # search, so all factors are tried, and factors after the end are ignored.
    while factor > NARROWEST and not (wt.device.type == "cpu" and int(failures) >= PATIENCE):
        factor *= 1 - STEP
        better = best.attempt(torch.full_like(best.factor, factor), failures < PATIENCE)
        failures = torch.where(better.any(), 0, failures + 1)
    return grid.spanning(best.factor)


def _loss(w: Tensor, grid: WeightGrid, scales: GroupScales, moments: Tensor | None, scratch: Tensor) -> Tensor:
    """Return the error of each group in each row, weighted with ``moments``.

    The result is ``[m, n]`` for m groups and n rows.
    """
    error = grid.error(w, grid.with_subscales(w, scales), scratch).view(-1, grid.group, w.shape[1])  # [m, g, n]
    if moments is None:
        return error.square_().sum(1)
    if moments.ndim == 2:
        return error.square_().mul_(moments[:, :, None]).sum(1)
    return torch.bmm(moments, error).mul_(error).sum(1)
