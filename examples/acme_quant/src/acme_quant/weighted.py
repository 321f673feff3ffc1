"""acme_weighted: scales chosen by the inputs. A group's range is the one whose rounding errors weigh least, each element's error squared
and multiplied by the mean square of its input channel; then every element goes to the nearest value, as ever.

That is the error of the outputs if channels were not correlated. llama.cpp weighs by its importance matrices likewise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from acme_quant.weighted_config import AcmeWeightedConfig
from quark.algorithms import Metrics, RoundingTask, Statistic
from quark.config.algorithm import AlgoConfig
from quark.quantizers import GroupScales, WeightGrid

__all__ = ["AcmeWeighted", "MeanSquare"]


class MeanSquare(Statistic):
    """The mean square of each input channel, ``[K]``. Sums over batches are float64, so that their order hardly matters."""

    def __init__(self, columns: int, device: torch.device) -> None:
        super().__init__(columns, device)
        self._sum = torch.zeros(columns, dtype=torch.float64, device=device)

    def accumulate(self, x: Tensor, reference: Tensor | None) -> None:
        self._sum += x.float().square().sum(0)

    def add(self, other: MeanSquare) -> None:
        self._sum += other._sum

    @property
    def value(self) -> Tensor:
        """The mean, float32; 0 where nothing was seen."""
        return (self._sum / max(self.tokens, 1)).float()


class AcmeWeighted:
    """The rounding. It asks a `quark.quantizers.WeightGrid` for scales and values, and so knows no format.

    The figure ``error_share`` of a layer is its weighted error over that under the observer's own ranges, the mean over rows: 1 where
    nothing was gained, never more.

    Args:
        settings: An `AcmeWeightedConfig`.
    """

    needs: ClassVar[Sequence[type[Statistic]]] = (MeanSquare,)

    def __init__(self, settings: AlgoConfig) -> None:
        assert isinstance(settings, AcmeWeightedConfig)
        self._factors = torch.linspace(settings.narrowest, settings.widest, settings.steps, device="cpu").tolist()

    def applies_to(self, name: str) -> bool:
        """Every layer."""
        return True

    @torch.no_grad()
    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        """Round to nearest under the scales whose weighted error is smallest."""
        weights = task.stacked()
        grid = weights.grid()
        scales, share = self._search(weights.wt, grid, task.statistic(MeanSquare).value)
        weights.keep(grid, grid.round_(weights.wt.clone(), grid.with_subscales(weights.wt, scales)), scales)
        return {name: {"error_share": float(part.mean())} for name, part in weights.by_layer(share).items()}

    def _search(self, wt: Tensor, grid: WeightGrid, importance: Tensor) -> tuple[GroupScales, Tensor]:
        """The best scales of every group, and what they leave of each row's error, ``[N]``; scales that span rows stay as they are."""
        if grid.fixed is not None:
            return grid.fixed, torch.ones_like(wt[0])
        low, high = grid.ranges(wt)
        best = grid.scales(wt)
        least = first = _error(wt, grid, best, importance)
        for factor in self._factors:
            tried = grid.scales_of_ranges(low * factor, high * factor)
            error = _error(wt, grid, tried, importance)
            best, least = best.where(error < least, tried), torch.minimum(least, error)
        before = first.sum(0)
        return best, torch.where(before > 0, least.sum(0) / before, 1.0)


def _error(wt: Tensor, grid: WeightGrid, scales: GroupScales, importance: Tensor) -> Tensor:
    """The weighted squared error of each group of each row, ``[groups, N]``."""
    error = grid.round_(wt.clone(), grid.with_subscales(wt, scales)).sub_(wt).square_().mul_(importance.unsqueeze(1))
    return error.view(-1, grid.group, wt.shape[1]).sum(1)
