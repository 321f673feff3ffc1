"""Rounding: choose the codes of a weight. A run has exactly one; this is the default one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from quark.nn import QuantizedLayer


class Rounding(Protocol):
    """Chooses the codes of the layers that share an input.

    On return each layer's ``weight`` holds values on the grid of its ``weight_quantizer``, whose scales are set.
    """

    def round(self, layers: Sequence[QuantizedLayer], *, shared_scale: bool) -> None:
        """Round the weights in place; with ``shared_scale`` the layers get one common per-tensor scale."""


class RoundToNearest:
    """Every element to the nearest value its scale allows, which needs no data. Source: spec of the algorithms, §1.1."""

    @torch.no_grad()
    def round(self, layers: Sequence[QuantizedLayer], *, shared_scale: bool) -> None:
        """As `Rounding.round`; one pass over each weight where scales are per group."""
        if shared_scale:
            self._round_shared(layers)
            return
        for layer in layers:
            quantizer = layer.weight_quantizer
            if quantizer is not None:
                weight = layer.weight.data  # type: ignore[union-attr]
                _, qparams = quantizer.quantizer.round_to_nearest(weight, out=weight)
                quantizer.set_qparams(qparams)

    def _round_shared(self, layers: Sequence[QuantizedLayer]) -> None:
        quantizers = [layer.weight_quantizer for layer in layers]
        observers = []
        for layer, quantizer in zip(layers, quantizers, strict=True):
            assert quantizer is not None
            observer = quantizer.quantizer.observer()
            observer.observe(layer.weight.data)  # type: ignore[union-attr, arg-type]
            observers.append(observer)
        merged = observers[0]
        for other in observers[1:]:
            merged.merge(other)
        for layer, quantizer in zip(layers, quantizers, strict=True):
            assert quantizer is not None
            qparams = quantizer.quantizer.qparams_from(merged)
            weight = layer.weight.data  # type: ignore[union-attr]
            quantizer.quantizer.fake_quantize(weight, qparams, out=weight)  # type: ignore[arg-type]
            quantizer.set_qparams(qparams)
