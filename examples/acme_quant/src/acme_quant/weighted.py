"""acme_weighted: round-to-nearest with scales chosen from calibration data.

Each group gets the range that minimizes its squared rounding errors, weighted by the mean square of each
input channel. This weighted sum is the output error if input channels are uncorrelated. llama.cpp weights
errors by its importance matrices in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from acme_quant.weighted_config import AcmeWeightedConfig
from quark.algorithms import Metrics, Rounding, RoundingTask, Statistic
from quark.config.algorithm import AlgoConfig
from quark.numbers import GroupScales, WeightGrid

__all__ = ["AcmeWeighted", "MeanSquare"]


class MeanSquare(Statistic):
    """The mean square of each of the K input channels.

    Sums over batches are float64, so the order of the batches hardly changes the result.
    """

    def __init__(self, columns: int, device: torch.device) -> None:
        super().__init__(columns, device)
        self._sum = torch.zeros(columns, dtype=torch.float64, device=device)

    def accumulate(self, x: Tensor, reference: Tensor | None) -> None:
        self._sum += x.float().square().sum(0)

    def add(self, other: MeanSquare) -> None:
        self._sum += other._sum

    @property
    def value(self) -> Tensor:
        """The mean squares as a float32 tensor ``[K]``. They are 0 if no token has been seen."""
        return (self._sum / max(self.tokens, 1)).float()


class AcmeWeighted(Rounding):
    """Rounds weights with a `quark.numbers.WeightGrid`, so it supports every format.

    The metric ``error_share`` of a layer is the weighted error divided by the weighted error with the ranges
    of the observer. The metric is a mean over rows, and is at most 1.

    Args:
        settings: An `AcmeWeightedConfig`.
    """

    needs = (MeanSquare,)

    def __init__(self, settings: AlgoConfig) -> None:
        assert isinstance(settings, AcmeWeightedConfig)
        self._factors = torch.linspace(settings.narrowest, settings.widest, settings.steps, device="cpu").tolist()

    @torch.no_grad()
    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        """Choose the scales with the smallest weighted error, round to nearest, and return each layer's
        metrics."""
        weights = task.stacked()
        grid = weights.grid()
        scales, share = self._search(weights.wt, grid, task.statistic(MeanSquare).value)
        weights.keep(grid, grid.round_(weights.wt.clone(), grid.with_subscales(weights.wt, scales)), scales)
        return {name: {"error_share": float(part.mean())} for name, part in weights.by_layer(share).items()}

    def _search(self, wt: Tensor, grid: WeightGrid, importance: Tensor) -> tuple[GroupScales, Tensor]:
        """Return the best scales of all groups, and the error ratio of each row.

        An error ratio is the error with the best scales divided by the error with the scales of the observer.
        The shape of the ratios is ``[N]``. If several rows share a scale, return the scales unchanged.
        """
        if grid.fixed is not None:
            return grid.fixed, torch.ones_like(wt[0])
        low, high = grid.ranges(wt)
        best = grid.scales(wt)
        least = first = _error(wt, grid, best, importance)
        for factor in self._factors:
            candidate = grid.scales_of_ranges(low * factor, high * factor)
            error = _error(wt, grid, candidate, importance)
            best, least = best.where(error < least, candidate), torch.minimum(least, error)
        before = first.sum(0)
        return best, torch.where(before > 0, least.sum(0) / before, 1.0)


def _error(wt: Tensor, grid: WeightGrid, scales: GroupScales, importance: Tensor) -> Tensor:
    """Return the weighted squared error of each group of each row, in the shape ``[groups, N]``."""
    error = grid.round_(wt.clone(), grid.with_subscales(wt, scales)).sub_(wt).square_().mul_(importance.unsqueeze(1))
    return error.view(-1, grid.group, wt.shape[1]).sum(1)
