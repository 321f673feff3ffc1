"""StackedWeights: the weights of a rounding as one matrix, their grid, and the way back into the layers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from quark.errors import ConfigError
from quark.models.layers import QuantizedLayer, QuantizerModule
from quark.numbers import GroupScales, RoundedGrid, WeightGrid

__all__ = ["StackedWeights", "float_weight", "weight_quantizer"]


class StackedWeights:
    """The weights of layers that are rounded together, as one matrix.

    Args:
        layers: By full name, with the float weights; all weights have one spec and the same number of input
            channels.
        shares_scale: Whether the layers get one common scale over the whole tensor.

    Attributes:
        wt: ``Wᵀ [K, N]``, float32, contiguous: an input channel is a row. A copy, which the algorithm may
            change.
        rows: How many of the N output channels each layer has.
    """

    def __init__(self, layers: Mapping[str, QuantizedLayer], *, shares_scale: bool = False) -> None:
        self._layers = layers
        self._shares_scale = shares_scale
        weights = [float_weight(layer) for layer in layers.values()]
        self._dtype = weights[0].dtype
        self.wt = torch.cat(weights).t().float().contiguous()  # [K, N]
        self.rows = [weight.shape[0] for weight in weights]

    def grid(self) -> WeightGrid:
        """Return the `WeightGrid` of the weights.

        Scales that span rows or layers are those of `wt` as it is now, changes included.
        """
        quantizers = [weight_quantizer(layer).quantizer for layer in self._layers.values()]
        return WeightGrid(quantizers, self.rows, self.wt, shared=self._shares_scale)

    def rounded_grid(self) -> RoundedGrid:
        """Return the grid of weights that are rounded already, with the scales that the layers have."""
        modules = [weight_quantizer(layer) for layer in self._layers.values()]
        qparams = [module.qparams for module in modules]
        if any(q is None for q in qparams):
            raise ConfigError(f"the weights of {', '.join(self._layers)} are not rounded yet: use grid()")
        return RoundedGrid([module.quantizer for module in modules], self.rows, self.wt, qparams)  # type: ignore[arg-type]

    def keep(self, grid: WeightGrid, qt: Tensor, scales: GroupScales) -> None:
        """Give the layers their rounded weights and their scales, and their codes where these are known.

        Args:
            grid: As `grid` returned it.
            qt: ``Qᵀ [K, N]``, values of the grid.
            scales: Of all groups.
        """
        for layer, (values, qparams, codes) in zip(self._layers.values(), grid.weights(qt, scales, self._dtype), strict=True):
            weight_quantizer(layer).set_qparams(qparams, codes=codes)
            layer.weight = nn.Parameter(values, requires_grad=False)

    def by_layer(self, per_row: Tensor) -> dict[str, Tensor]:
        """Return the part of each layer, by full name, of values ``[N]`` for all output channels."""
        return dict(zip(self._layers, per_row.split(self.rows), strict=True))


def weight_quantizer(layer: QuantizedLayer) -> QuantizerModule:
    """Return the weight quantizer of a layer.

    Raises:
        ConfigError: The layer has none.
    """
    if layer.weight_quantizer is None:
        raise ConfigError("a layer without a weight quantizer cannot be rounded")
    return layer.weight_quantizer


def float_weight(layer: QuantizedLayer) -> Tensor:
    """Return the weight of a layer that has not been rounded yet."""
    return layer.weight.data  # type: ignore[return-value]
