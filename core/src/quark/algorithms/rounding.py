"""Rounding: choose the codes of a weight. A run has exactly one; this is the default one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from quark.errors import ConfigError
from quark.nn import QuantizedLayer, QuantizerModule
from quark.numerics import Observer


class Rounding(Protocol):
    """Chooses the codes of the layers that share an input.

    On return each layer's ``weight`` holds values on the grid of its ``weight_quantizer``, whose scales are set.
    """

    def round(self, layers: Sequence[QuantizedLayer], *, shared_scale: bool) -> None:
        """Round the weights; with ``shared_scale`` the layers get one common scale over the whole tensor."""


class RoundToNearest:
    """Every element to the nearest value its scale allows, which needs no data. Source: spec of the algorithms, §1.1.

    A layer gets a new parameter, and lets its old one go: weights that are mapped from a checkpoint are read once and never written, which
    would copy them page by page, and a parameter that another module shares stays what it is there.
    """

    @torch.no_grad()
    def round(self, layers: Sequence[QuantizedLayer], *, shared_scale: bool) -> None:
        """As `Rounding.round`."""
        quantizers = [_quantizer(layer) for layer in layers]
        shared = _seen_by_all(layers, quantizers) if shared_scale else None
        for layer, quantizer in zip(layers, quantizers, strict=True):
            weight = _weight(layer)
            if shared is None:
                values, qparams = quantizer.quantizer.round_to_nearest(weight)
            else:
                qparams = quantizer.quantizer.find_qparams(weight, shared)
                values = quantizer.quantizer.fake_quantize(weight, qparams)
            layer.weight = nn.Parameter(values, requires_grad=False)
            quantizer.set_qparams(qparams)


def _seen_by_all(layers: Sequence[QuantizedLayer], quantizers: Sequence[QuantizerModule]) -> Observer:
    """An observer of the range that the weights of all layers span together."""
    observer = quantizers[0].quantizer.observer()
    for layer in layers:
        observer.observe(_weight(layer))
    return observer


def _quantizer(layer: QuantizedLayer) -> QuantizerModule:
    if layer.weight_quantizer is None:
        raise ConfigError("a layer without a weight quantizer cannot be rounded")
    return layer.weight_quantizer


def _weight(layer: QuantizedLayer) -> Tensor:
    return cast("nn.Parameter", layer.weight).data
