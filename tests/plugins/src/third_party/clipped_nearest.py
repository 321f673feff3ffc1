"""Two roundings: one chooses ranges by output error, the other needs no data."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quark.algorithms import Hessian, Metrics, Rounding, RoundingTask, RoundToNearest
from third_party.algorithms import ClippedNearestConfig


class ClippedNearest(Rounding):
    """Round to nearest; narrow the range of a group if this makes ``Σ_k H_kk (w_k − q_k)²`` smaller."""

    needs = (Hessian,)

    def __init__(self, settings: ClippedNearestConfig) -> None:
        self._factors = torch.linspace(settings.narrowest, 1, 7).tolist()

    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        """Search, and round."""
        weights = task.stacked()
        grid, wt = weights.grid(), weights.wt
        diagonal = task.statistic(Hessian).matrix().diagonal().unsqueeze(1)  # [K, 1]
        scales = grid.fixed or grid.scales(wt)
        if grid.fixed is None:
            low, high = grid.ranges(wt)
            least = torch.full_like(low, torch.inf)  # [groups, N]
            for factor in self._factors:
                tried = grid.scales_of_ranges(low * factor, high * factor)
                loss = (grid.round_(wt.clone(), grid.with_subscales(wt, tried)) - wt).square() * diagonal
                loss = loss.view(-1, grid.group, wt.shape[1]).sum(1)
                scales, least = scales.where(loss < least, tried), torch.minimum(loss, least)
        weights.keep(grid, grid.round_(wt, grid.with_subscales(wt, scales)), scales)
        return {}


class CountedNearest(RoundToNearest):
    """Round to nearest without data, and return the number of layers rounded together as a metric."""

    def __init__(self, settings: object) -> None:
        pass

    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        """Round to nearest."""
        super().round(task)
        return {name: {"layers": len(task.layers)} for name in task.layers}
