"""AWQ's clipping: weights are cut off where their groups' ranges are better narrower, judged by the outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from quark.numerics import WeightGrid
from quark_algos.columns.scales import search
from quark_algos.smooth.quadratic import Quadratic


def clip(wt: Tensor, quadratic: Quadratic, grid: WeightGrid) -> Tensor:
    """Weights whose own ranges give the best scales, so that any rounding by ranges finds them.

    The search is that of `quark_algos.columns.scales`: for each row and group, ranges down to 0.525 of the whole, by ``δ H_gg δᵀ``. AWQ's
    reaches down to 0.5 in ten steps and has the same objective, of a sample of tokens. A rounding that searches scales itself has no use
    for this. Rows whose whole error, ``δ H δᵀ``, does not get smaller stay as they are. Source: arXiv 2306.00978, and spec of the
    algorithms, §1.5.

    Args:
        wt: Wᵀ ``[K, N]``, float32, scales folded in.
        quadratic: Of the inputs of those weights, after the scales (`quark_algos.smooth.quadratic.moved`).
        grid: For those weights. Where its scales span rows nothing is clipped.

    Returns:
        ``[K, N]``; ``wt`` itself where nothing is clipped.
    """
    if grid.fixed is not None:
        return wt
    found = search(wt, grid, quadratic.h.float())
    low, high = grid.ranges(wt)
    factor = found.scale / grid.scales_of_ranges(low, high).scale
    narrower = factor.clamp_max(1).view(-1, 1, wt.shape[1])
    groups = wt.view(-1, grid.group, wt.shape[1])
    cut = torch.minimum(torch.maximum(groups, low[:, None] * narrower), high[:, None] * narrower).view_as(wt)
    is_better = _rounding_loss(cut, wt, grid, quadratic) < _rounding_loss(wt, wt, grid, quadratic)
    return torch.where(is_better, cut, wt)


def _rounding_loss(w: Tensor, wanted: Tensor, grid: WeightGrid, quadratic: Quadratic) -> Tensor:
    """Of each row, ``[N]``, when ``w`` is rounded by its own ranges."""
    scales = grid.with_steps(w, grid.scales(w))
    return quadratic.rows(grid.round_(w.clone(), scales).sub_(wanted))
