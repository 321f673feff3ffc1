"""Codes and scales as checkpoints store them: conversions for one tensor, and a linear layer as `CodedLayer`.

Shapes and dtypes of stored tensors come from packing meta tensors, so they always agree with the packing
code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Self

import attrs
import torch
from torch import Tensor, nn

from quark.base.log import get_logger
from quark.config.layer import QLayerConfig, Slot, levels
from quark.errors import CheckpointError, ConfigError
from quark.models.layers.quantized_layers import QuantizedLayer
from quark.models.layers.quantizer_module import QuantizerModule
from quark.numbers import QParams, TensorQuantizer, cast_finite, quantizer_for
from quark.numbers.on_grid import LOSSY, codes_error
from quark.plugins.attribution import origin


@attrs.frozen(eq=False)
class CodedLayer:
    """The codes and scales of a quantized linear layer.

    Attributes:
        config: Quantization of its weight and input.
        codes: Codes of the weight, ``[O, I]``, in its number format.
        qparams: Scales and zero points of the weight.
        input: Scale of a static input; None if inputs are float or find their scales at run time.
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
        """Set a layer's weight and scales to the stored codes and scales.

        Args:
            layer: A layer of the same configuration; its weight gives the dtype, and may be on the meta
                device.
            name: Its full name, for messages.
            keeps_codes: Whether the layer keeps these codes for storage; if not, an export computes them from
                its values.

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
        """Set the scale of a layer's input if it is static. Raises as `put_into` does."""
        if self.input is not None and layer.input_quantizer is not None:
            qparams = self.input.map(lambda scale: scale.reshape(()))
            refuse_bad_scales(qparams, f"the input of '{name}'", activation=True)
            layer.input_quantizer.set_qparams(qparams)


def restored_parameter(quantizer: QuantizerModule, codes: Tensor, qparams: QParams, dtype: torch.dtype) -> nn.Parameter:
    """Return the values of codes as a parameter in that dtype, and give the quantizer their scales."""
    quantizer.set_qparams(qparams)
    return nn.Parameter(cast_finite(quantizer.quantizer.dequantize(codes, qparams), dtype), requires_grad=False)


def refuse_bad_scales(qparams: QParams, of: str, *, activation: bool) -> None:
    """Check that scales are valid.

    With a scale of 0, an activation becomes infinite, and a group of a weight dequantizes to zeros. Other
    tools write such scales for groups of zeros, so a 0 among a weight's scales is only logged.

    Args:
        qparams: Unpacked scales of a checkpoint.
        of: Name of the tensor, for messages.
        activation: Whether the tensor is an input or output.

    Raises:
        CheckpointError: A scale is NaN, infinite or negative, or a scale of an activation is 0.
    """
    for scale in (qparams.scale, qparams.outer_scale):
        if scale is None or scale.is_meta or scale.numel() == 0:
            continue
        values = scale.detach().float()
        low, high = (float(v) for v in values.aminmax())
        if low > 0 and high < math.inf:  # false for NaN, which aminmax returns
            continue
        bad = int((~((values >= 0) & (values < math.inf))).sum())
        zeros = int((values == 0).sum())
        if bad or activation:
            raise CheckpointError(
                f"{bad or zeros} of {values.numel()} scale(s) of {of} are {'NaN, infinite or negative' if bad else '0'}: the checkpoint is "
                "damaged, or the quantized model overflowed. Make or fetch it again"
            )
        get_logger(__name__).warning(f"{zeros} of {values.numel()} scale(s) of {of} are 0: their groups dequantize to zeros")


def restore(
    quantizer: QuantizerModule,
    slot: Slot,
    tensors: Mapping[str, Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    order: str,
    name: str,
    *,
    holds_values: bool = False,
) -> dict[str, nn.Parameter]:
    """Give a quantizer its stored scales, and return the parameter by name; empty for an activation.

    This is the inverse of `stored_tensors`.

    Args:
        quantizer: Quantizer of a tensor of a layer.
        slot: The tensor.
        tensors: Stored tensors by suffix; codes or values are in the layout of the layer.
        shape: Shape of the tensor, as its quantizer sees it.
        dtype: Dtype of the parameter.
        order: Order of 4-bit codes in a word.
        name: Full name of the layer, for messages.
        holds_values: Whether parameters are stored as values instead of codes.

    Raises:
        CheckpointError: A scale is not valid, or the codes have another shape.
    """
    inner, stored = quantizer.quantizer, dict(tensors)
    if slot.is_activation or holds_values:
        qparams = inner.unpack_qparams(stored, shape, order=order)
        if slot.is_activation:
            refuse_bad_scales(qparams, f"the {slot.label} of '{name}'", activation=True)
        quantizer.set_qparams(qparams)
        return {} if slot.is_activation else {slot: as_parameter(stored[""])}
    codes, qparams = inner.unpack(stored, shape, order=order)
    if tuple(codes.shape) != shape:
        raise CheckpointError(f"the {slot} of '{name}' unpacks to {list(codes.shape)} instead of {list(shape)}")
    refuse_bad_scales(qparams, f"the {slot} of '{name}'", activation=False)
    return {slot: restored_parameter(quantizer, codes, qparams, dtype)}


def as_parameter(tensor: Tensor) -> nn.Parameter:
    """Return a tensor as a parameter without gradient; a parameter is returned itself."""
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)


def stored_tensors(name: str, module: QuantizerModule, values: Tensor, order: str) -> dict[str, Tensor]:
    """Return the checkpoint tensors of a quantized tensor, by suffix.

    Every scale and a sample of the codes are checked.

    Args:
        name: Full name, for messages.
        module: The quantizer, which has the scales.
        values: Values on the quantizer's grid; float values if the quantizer says so (``is_deferred``).
        order: Order of 4-bit codes in a word.

    Raises:
        ConfigError: The values are not on the grid, because they were changed after rounding.
        PluginError: Codes change when they are packed and unpacked; the message names the format.
    """
    quantizer, qparams = module.quantizer, module.qparams
    assert qparams is not None
    codes = module.codes_of(values.detach())
    complaint = _complaint(name, module, values.detach(), codes, order)
    tensors = quantizer.pack(codes, qparams, order=order)
    announced = packed_meta(quantizer, tuple(values.shape), order)
    if any(n in announced and (t.shape, t.dtype) != (announced[n].shape, announced[n].dtype) for n, t in tensors.items()):
        complaint = "packs real tensors to other shapes or dtypes than meta tensors, which determine the layout of files"
    if complaint is not None:
        raise origin("formats", quantizer.stored_level.format.name).error(f"{complaint} (at '{name}')")
    return tensors


def checked_codes(name: str, module: QuantizerModule, values: Tensor) -> Tensor:
    """Return the codes of a quantized tensor, after a check of a sample.

    Args:
        name: Full name, for messages.
        module: The quantizer, which has the scales.
        values: Values on the quantizer's grid.

    Raises:
        ConfigError: The values are not on the grid, because they were changed after rounding.
    """
    codes = module.codes_of(values.detach())
    _complaint(name, module, values.detach(), codes, "reorder")
    return codes


def _complaint(name: str, module: QuantizerModule, values: Tensor, codes: Tensor, order: str) -> str | None:
    """Return why the format cannot pack these codes, or None; raise ConfigError if the values need others."""
    quantizer, qparams = module.quantizer, module.qparams
    assert qparams is not None
    complaint = codes_error(quantizer, qparams, values, codes, order, is_rounded=not module.is_deferred)
    if complaint is not None and complaint != LOSSY:
        names = [level.dtype.name for level in levels(quantizer.spec)]
        raise ConfigError(
            f"'{name}' cannot be stored as {' → '.join(names)}: it {complaint}. It was changed after it was quantized, or by a broken "
            "plugin: quantize the model again"
        )
    return complaint


def packed_meta(quantizer: TensorQuantizer, shape: tuple[int, ...], order: str) -> dict[str, Tensor]:
    """Return the checkpoint tensors of a quantized tensor of that shape by suffix, on the meta device."""
    return dict(_packed_meta(quantizer, shape, order))


def packed_scales(quantizer: TensorQuantizer, shape: tuple[int, ...], order: str) -> dict[str, Tensor]:
    """Return the stored scales of an activation of that shape by suffix, on the meta device.

    Empty if they are dynamic.
    """
    if quantizer.is_dynamic or quantizer.is_float:
        return {}
    return quantizer.pack_qparams(quantizer.empty_qparams(shape, "meta"), order=order)


@lru_cache(maxsize=1024)
def _packed_meta(quantizer: TensorQuantizer, shape: tuple[int, ...], order: str) -> dict[str, Tensor]:
    """Return `packed_meta`, cached by shape.

    Operations on meta tensors take longer than packing a small layer, and shapes repeat.
    """
    tensors = quantizer.pack(*quantizer.empty_codes(shape), order=order)
    if strange := [suffix for suffix in tensors if suffix and not suffix.isidentifier()]:
        raise origin("formats", quantizer.stored_level.format.name).error(
            f"packs a tensor of the suffix {strange[0]!r}, under which no reader would find it: name it with letters, digits and '_'"
        )
    return tensors
