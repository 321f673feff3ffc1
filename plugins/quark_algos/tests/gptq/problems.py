"""Random problems of calibrated rounding.

A stacked weight, second moments of correlated inputs, and grids of documented specs.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from quark.config.enums import Dtype, QSchemeType
from quark.config.layer import TensorSpec
from quark.config.tensor import QTensorConfig
from quark.numbers import GroupScales, WeightGrid, quantizer_for

N = 12


@attrs.frozen(eq=False)
class Setting:
    """``W [N, K]`` and moments ``[K, K]``, float64, K = 96 unless told.

    Every input is a mixture of the others, and some are loud.
    """

    W: Tensor
    H: Tensor
    D: Tensor

    @property
    def wt(self) -> Tensor:
        """Wᵀ."""
        return self.W.t().contiguous()


def setting(seed: int, K: int = 96, tokens: int = 400) -> Setting:
    g = torch.Generator().manual_seed(seed)
    mixing = torch.randn(K, K, generator=g, dtype=torch.float64) / K**0.5 + torch.eye(K, dtype=torch.float64)
    loudness = torch.rand(K, 1, generator=g, dtype=torch.float64) * 3 + 0.1
    x = loudness * (mixing @ torch.randn(K, tokens, generator=g, dtype=torch.float64))
    seen = x + 0.1 * torch.randn(K, tokens, generator=g, dtype=torch.float64)
    return Setting(torch.randn(N, K, generator=g, dtype=torch.float64) * 0.05, seen @ seen.t(), (x - seen) @ seen.t())


def grouped(dtype: Dtype, group: int, *, symmetric: bool = True) -> QTensorConfig:
    """An integer spec with a scale for each group."""
    return QTensorConfig(
        dtype=dtype,
        qscheme=QSchemeType.per_group,
        ch_axis=-1,
        group_size=group,
        symmetric=symmetric,
        is_dynamic=False,
        observer_cls="PerGroupMinMaxObserver",
    )


def grid_for(spec: TensorSpec, wt: Tensor) -> tuple[WeightGrid, GroupScales]:
    """The grid of one layer, and its scales by the range of its weight."""
    grid = WeightGrid([quantizer_for(spec, activation=False)], [wt.shape[1]], wt.float())
    return grid, grid.fixed or grid.scales(wt.float())


def damped(H: Tensor, share: float) -> Tensor:
    """``H + λ I``, λ a share of the mean diagonal."""
    return H + share * H.diagonal().mean() * torch.eye(H.shape[0], dtype=H.dtype)
