"""The quantized classes of torch's convolutions.

In all of them, also in transposed convolutions, scales per channel belong to the output channels, and the
groups of scales run along the input channels. A weight keeps torch's layout, so that the ``forward`` of the
float class can be used. The quantizer of the weight gets the weight as a matrix with the shape ``[out, kernel
positions · in / groups]``, where ``groups`` is an attribute of the convolution. If activations have a scale
per group or per position, the quantizer gets the activations with the channels as the last axis.
"""

from __future__ import annotations

from torch import nn

from quark.config.layer import Slot, TensorSpec
from quark.models.layers.layer_types import LayerShape
from quark.models.layers.quantized_layers import QuantizedLayer
from quark.numbers import ChannelsLast, KernelMatrix, TensorQuantizer, quantizer_for, viewed


class QuantizedConvolution(QuantizedLayer):
    """The base class of quantized convolutions in quark-core and in plugins.

    Inputs and outputs have the shape ``[batch, channels, …]`` or ``[channels, …]``. In the spec of a weight,
    ``ch_axis=0`` means the output channels, whatever layout the float class uses. Planning refuses any other
    axis for a weight. Groups of a weight run along the input channels. If the group size divides the number
    of input channels, no group spans two kernel positions. In the spec of activations, ``ch_axis=1`` means
    the channels, for both static and dynamic scales. Groups of activations run along the channels.
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
