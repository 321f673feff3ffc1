"""Round to nearest under scales that are searched by what they do to the outputs: AWQ's clipping, as the rounding that goes with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from quark.algorithms import Hessian, Metrics, RoundingTask, Statistic
from quark_algos.gptq.damping import shrunk
from quark_algos.scale_search import search

__all__ = ["SearchedNearest"]


class SearchedNearest:
    """Every element to the nearest value, of scales whose groups' errors weigh least in the outputs."""

    needs: ClassVar[Sequence[type[Statistic]]] = (Hessian,)

    def applies_to(self, name: str) -> bool:
        """Every layer."""
        return True

    @torch.no_grad()
    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        """Round to nearest under searched scales; there is nothing to report."""
        hessian = task.statistic(Hessian)
        weights = task.stacked()
        grid = weights.grid()
        scales = search(weights.wt, grid, shrunk(hessian.matrix(), hessian.shrinkage()))
        subscales = grid.with_subscales(weights.wt, scales)
        weights.keep(grid, grid.round_(weights.wt, subscales), scales)
        return {name: {} for name in task.layers}
