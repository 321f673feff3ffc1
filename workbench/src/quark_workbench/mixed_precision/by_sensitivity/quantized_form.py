"""QuantizedForm: a layer as it would be in a candidate's scheme, rounded to nearest, without a calibration."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor, nn

from quark.algorithms import RoundingTask, RoundToNearest
from quark.models.layers import QuantizedLayer, quantized_class
from quark.numbers import quantizer_for
from quark_workbench.mixed_precision import Candidate

__all__ = ["QuantizedForm"]


class QuantizedForm:
    """A layer in a candidate's scheme: its weight rounded to nearest, its input quantized with scales of that input itself.

    Args:
        name: Full name of the layer.
        layer: The float layer, which is not changed.
        candidate: One that quantizes.
    """

    def __init__(self, name: str, layer: nn.Module, candidate: Candidate) -> None:
        spec = candidate.config.input_tensors
        self._input = None if spec is None else quantizer_for(spec, activation=True)
        config = attrs.evolve(candidate.config.copied(), input_tensors=None, output_tensors=None)
        self._layer = quantized_class(layer).from_float(layer, config)
        RoundToNearest().round(RoundingTask({name: self._layer}))

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """Return the layer's output for the input ``[…, K]``."""
        rounded = x if self._input is None else self._input.fake_quantize(x.contiguous())
        output: Tensor = QuantizedLayer.forward(self._layer, rounded)
        return output
