"""Round-to-nearest under scales searched by the output error: AWQ's clipping (arXiv 2306.00978) as a rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from quark.algorithms import Hessian, Metrics, RoundingTask, Statistic
from quark.numbers import GroupScales
from quark_algos.gptq.damping import shrunk
from quark_algos.scale_search import search

__all__ = ["SearchedNearest"]


class SearchedNearest:
    """Rounds every element to nearest, under the group scales with the smallest output error by the Hessian."""

    needs: ClassVar[Sequence[type[Statistic]]] = (Hessian,)

    def applies_to(self, name: str) -> bool:
        """Return True: every layer is rounded."""
        return True

    @torch.no_grad()
    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        """Round to nearest under searched scales; return empty metrics."""
        hessian = task.statistic(Hessian)
        weights = task.stacked()
        grid = weights.grid()
        h = shrunk(hessian.matrix(), hessian.shrinkage())

        def searched(rows: slice) -> GroupScales:
            return search(weights.wt[:, rows], grid.of_rows(rows), h)

        rows = weights.wt.shape[1]
        # Rows are independent, unless scales span them.
        scales = GroupScales.beside(task.by_rows(searched, rows)) if grid.fixed is None else search(weights.wt, grid, h)
        weights.keep(grid, grid.round_(weights.wt, grid.with_subscales(weights.wt, scales)), scales)
        return {name: {} for name in task.layers}
