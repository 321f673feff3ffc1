"""Quantized convolutions of torch: scales per output channel, groups of scales along the input channels.

This holds for transposed convolutions too. A weight keeps torch's layout, so that the float class's forward
applies. Its quantizer sees the matrix ``[out, kernel positions · in / groups]``. For scales per group or
vector, inputs and outputs are quantized with their channels last.
"""

from __future__ import annotations

from torch import nn

from quark.config.layer import Slot, TensorSpec
from quark.models.layers.layer_types import LayerShape
from quark.models.layers.quantized_layers import QuantizedLayer
from quark.numbers import ChannelsLast, KernelMatrix, TensorQuantizer, quantizer_for, viewed


class QuantizedConvolution(QuantizedLayer):
    """Base of quantized convolutions, in core and in plugins.

    Inputs and outputs are ``[batch, channels, …]`` or ``[channels, …]``. ``ch_axis=0`` of a weight means the
    output channels, however the float class stores it; planning refuses other axes. Groups run along the
    input channels, separately for each kernel position if the group size divides them. For activations,
    ``ch_axis=1`` means the channels, static or dynamic, and groups run along the channels.
    """

    @classmethod
    def quantizer_of(cls, slot: Slot, spec: TensorSpec, shape: LayerShape) -> TensorQuantizer:
        # activation=True would turn a dynamic scale per channel into one per token; here ``ch_axis`` decides.
        quantizer = quantizer_for(spec, activation=False)
        if slot is Slot.weight:
            return viewed(quantizer, KernelMatrix(shape.is_transposed, shape.groups))
        if slot.is_activation and quantizer.granularity.is_local:
            return viewed(quantizer, ChannelsLast(1 - shape.rank))
        return quantizer


class QuantConv1d(QuantizedConvolution, nn.Conv1d):  # type: ignore[misc]
    """A quantized ``nn.Conv1d``."""


class QuantConv2d(QuantizedConvolution, nn.Conv2d):  # type: ignore[misc]
    """A quantized ``nn.Conv2d``."""


class QuantConv3d(QuantizedConvolution, nn.Conv3d):  # type: ignore[misc]
    """A quantized ``nn.Conv3d``."""


class QuantConvTranspose1d(QuantizedConvolution, nn.ConvTranspose1d):  # type: ignore[misc]
    """A quantized ``nn.ConvTranspose1d``."""


class QuantConvTranspose2d(QuantizedConvolution, nn.ConvTranspose2d):  # type: ignore[misc]
    """A quantized ``nn.ConvTranspose2d``."""


class QuantConvTranspose3d(QuantizedConvolution, nn.ConvTranspose3d):  # type: ignore[misc]
    """A quantized ``nn.ConvTranspose3d``."""
