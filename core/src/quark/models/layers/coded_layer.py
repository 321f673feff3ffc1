"""CodedLayer: the codes and scales of a linear layer as a checkpoint stores them."""

from __future__ import annotations

import math
from typing import Self

import attrs
import torch
from torch import Tensor, nn

from quark.base.log import get_logger
from quark.config.layer import QLayerConfig
from quark.errors import CheckpointError
from quark.models.layers.quantized_layers import QuantizedLayer
from quark.models.layers.quantizer_module import QuantizerModule
from quark.numbers import QParams, cast_finite, quantizer_for

__all__ = ["CodedLayer", "refuse_bad_scales", "restored_parameter"]


@attrs.frozen(eq=False)
class CodedLayer:
    """The codes and scales of a quantized linear layer.

    Attributes:
        config: How its weight and input are quantized.
        codes: Of the weight, ``[O, I]``, as its number format has them.
        qparams: Scales and zero points of the weight.
        input: The scale of a static input; None where inputs are float or find their scales at run time.
    """

    config: QLayerConfig
    codes: Tensor
    qparams: QParams
    input: QParams | None = None

    @classmethod
    def empty(cls, config: QLayerConfig, shape: tuple[int, ...]) -> Self:
        """Return a layer with a weight of that shape on the meta device."""
        assert config.weight is not None
        codes, qparams = quantizer_for(config.weight, activation=False).empty_codes(shape)
        inputs = None if config.input_tensors is None else quantizer_for(config.input_tensors, activation=True)
        is_static = inputs is not None and not inputs.is_dynamic and not inputs.is_float
        return cls(config, codes, qparams, inputs.empty_qparams((1,), "meta") if inputs is not None and is_static else None)

    def put_into(self, layer: QuantizedLayer, name: str, *, keeps_codes: bool) -> None:
        """Set the weight of a layer, and its scales, to the stored codes and scales.

        Args:
            layer: Of the same configuration; its weight gives the dtype, and may be on the meta device.
            name: Its full name, for messages.
            keeps_codes: Whether the layer is to be stored with these very codes; else they follow from its
                values.

        Raises:
            CheckpointError: A scale is not valid.
        """
        quantizer = layer.weight_quantizer
        assert quantizer is not None
        refuse_bad_scales(self.qparams, f"the weight of '{name}'", activation=False)
        values = restored_parameter(quantizer, self.codes, self.qparams, layer.weight.dtype)  # type: ignore[arg-type]
        layer._parameters["weight"] = values
        quantizer.codes = self.codes if keeps_codes else None
        self.set_input(layer, name)

    def set_input(self, layer: QuantizedLayer, name: str) -> None:
        """Set the scale of the input of a layer where it is static. Raises as `put_into`."""
        if self.input is not None and layer.input_quantizer is not None:
            qparams = self.input.map(lambda scale: scale.reshape(()))
            refuse_bad_scales(qparams, f"the input of '{name}'", activation=True)
            layer.input_quantizer.set_qparams(qparams)


def restored_parameter(quantizer: QuantizerModule, codes: Tensor, qparams: QParams, dtype: torch.dtype) -> nn.Parameter:
    """Return the values of codes as a parameter in that dtype, and set the quantizer to their scales."""
    quantizer.set_qparams(qparams)
    return nn.Parameter(cast_finite(quantizer.quantizer.dequantize(codes, qparams), dtype), requires_grad=False)


def refuse_bad_scales(qparams: QParams, of: str, *, activation: bool) -> None:
    """Check that scales are valid.

    With a scale of 0 an activation becomes infinite, and a group of a weight dequantizes to zeros. Other
    tools write such scales for groups of zeros, so a 0 among a weight's scales is logged and not refused.

    Args:
        qparams: Unpacked scales of a checkpoint.
        of: Name of the tensor, for messages.
        activation: Whether the tensor is an input or output.

    Raises:
        CheckpointError: A scale is NaN, infinite or negative; or a scale of an activation is 0.
    """
    for scale in (qparams.scale, qparams.outer_scale):
        if scale is None or scale.is_meta or scale.numel() == 0:
            continue
        values = scale.detach().float()
        low, high = (float(v) for v in values.aminmax())
        if low > 0 and high < math.inf:  # false for NaN, which aminmax passes on
            continue
        bad = int((~((values >= 0) & (values < math.inf))).sum())
        zeros = int((values == 0).sum())
        if bad or activation:
            raise CheckpointError(
                f"{bad or zeros} of {values.numel()} scale(s) of {of} are {'NaN, infinite or negative' if bad else '0'}: the checkpoint is "
                "damaged, or the quantized model overflowed. Make or fetch it again"
            )
        get_logger(__name__).warning(f"{zeros} of {values.numel()} scale(s) of {of} are 0: their groups dequantize to zeros")
