"""SmoothQuant: ``s = max|x|^α / max|w|^(1−α)`` (arXiv 2211.10438)."""

from __future__ import annotations

import torch
from torch import Tensor

from quark.algorithms import AbsMax, BlockContext
from quark.config.algorithm import AlgoConfig
from quark.models.layers.quantized_layers import linear_weight
from quark_algos.equalization.candidates import is_known
from quark_algos.equalization.config import SmoothQuantConfig
from quark_algos.equalization.equalization import Equalization
from quark_algos.mappings.resolve import ResolvedMapping

__all__ = ["SmoothQuant", "smoothquant"]


class SmoothQuant(Equalization):
    """The transform ``smoothquant``. Its scales are ``s = max|x|^α / max|w|^(1−α)`` (arXiv 2211.10438)."""

    needs = (AbsMax,)

    def __init__(self, settings: AlgoConfig) -> None:
        super().__init__(settings)
        assert isinstance(settings, SmoothQuantConfig)
        self._alpha, self._smallest = settings.resolved().alpha, settings.scale_clamp_min

    def scale(self, modules: ResolvedMapping, block: BlockContext) -> Tensor | None:
        layers = self._read(modules, block)
        if not layers:
            return None
        x = modules.channels.reduced(self._combined(modules, block, AbsMax), "max")
        w = torch.stack([linear_weight(m).abs().amax(0).float() for m in layers.values()]).amax(0)
        return smoothquant(x, modules.channels.reduced(w, "max"), self._alpha, self._smallest)


def smoothquant(x_max: Tensor, w_max: Tensor, alpha: float, clamp: float) -> Tensor:
    """Return SmoothQuant's scales, ``max|x|^α / max|w|^(1−α)``.

    Source: arXiv 2211.10438, equation 4.

    Args:
        x_max: The largest magnitude of each channel of the activations, ``[C]``, float32.
        w_max: The largest magnitude of the weights of each channel, over all balance layers, ``[C]``,
            float32.
        alpha: The migration strength α, from 0 to 1.
        clamp: The smallest scale.

    Returns: Scales ``[C]``, float32. A channel gets the scale 1 if its activations or its weights are all 0,
    or if their largest magnitude is not finite.
    """
    s = x_max.float().pow(alpha) / w_max.float().pow(1 - alpha)
    return torch.where(is_known(x_max) & is_known(w_max), s.clamp_min(clamp), torch.ones_like(s))
