"""Choose scales by what rounding with them does to the outputs: ``δ H_gg δᵀ`` for each row and group, δ its rounding error.

Ranges are shrunk, or stretched, by a few factors and the best one is kept, for each group by itself. Source: spec of the algorithms, §1.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quark.numerics import GroupScales, WeightGrid

COARSE = (1.0, 0.925, 0.85, 0.775, 0.7, 0.625, 0.55)
"""Of ranges, from all of it down to a little more than half: the best of these is found first, for each row and group."""
FINE = (-0.025, 0.025)
"""Then these are added to it."""
POWERS = (1.0, 0.5, 2.0)
"""In place of both where scales are powers of two."""
WIDEST = 256
"""Groups of more channels than this are judged by H's diagonal alone: products with whole blocks of it would cost more than solving."""
PIECE = 1 << 17
"""Weights that are worked on at a time, so that they stay in cache."""


def search(wt: Tensor, grid: WeightGrid, h: Tensor | None) -> GroupScales:
    """Scales of all groups, each the best of several.

    Args:
        wt: Wᵀ ``[m · group, N]``, float32.
        grid: With ``grid.fixed`` None.
        h: H ``[m · group, m · group]`` of the same channels, of which the blocks on the diagonal count; None for plain squared errors.
    """
    weights = None if h is None else _weights(h, grid.group)
    size = max(1, PIECE // wt.shape[0])
    parts = []
    for left in range(0, wt.shape[1], size):
        rows = slice(left, min(left + size, wt.shape[1]))
        parts.append(_search_piece(wt[:, rows].contiguous(), rows, grid, weights))
    return GroupScales.beside(parts)


def _search_piece(w: Tensor, rows: slice, grid: WeightGrid, weights: Tensor | None) -> GroupScales:
    low, high = grid.ranges(w, rows)
    best = grid.scales_of_ranges(low, high, rows)
    room = torch.empty_like(w)
    least = _loss(w, grid, best, weights, room)
    chosen = torch.ones_like(least)

    def attempt(factor: Tensor) -> None:
        nonlocal best, least, chosen
        scales = grid.scales_of_ranges(low * factor, high * factor, rows)
        loss = _loss(w, grid, scales, weights, room)
        better = loss < least
        best, least, chosen = best.where(better, scales), torch.where(better, loss, least), torch.where(better, factor, chosen)

    in_powers = _is_power_of_two(best.scale)
    for factor in (POWERS if in_powers else COARSE)[1:]:
        attempt(torch.full_like(least, factor))
    centre = chosen
    for step in () if in_powers else FINE:
        attempt(centre + step)
    return best


def _loss(w: Tensor, grid: WeightGrid, scales: GroupScales, weights: Tensor | None, room: Tensor) -> Tensor:
    """The weighted squared error of each group of each row, ``[m, n]``."""
    error = grid.round_(room.copy_(w), grid.with_steps(w, scales)).sub_(w).view(-1, grid.group, w.shape[1])  # [m, g, n]
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
