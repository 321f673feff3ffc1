"""Conversions between a quantized tensor and the codes and scales that a checkpoint stores for it.

`CodedLayer` has the codes and scales of a linear layer. To find the shapes and dtypes of stored tensors, the
functions here pack meta tensors. So the shapes always agree with the code that packs.
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
        config: Quantization of the weight and the input.
        codes: Codes of the weight, with the shape ``[out, in]``. The number format of the weight defines
            their meaning.
        qparams: Scales and zero points of the weight.
        input: Static scale of the input. It is None if the input stays float or has dynamic scales.
    """

    config: QLayerConfig
    codes: Tensor
    qparams: QParams
    input: QParams | None = None

    @classmethod
    def empty(cls, config: QLayerConfig, shape: tuple[int, ...]) -> Self:
        """Return a `CodedLayer` on the meta device. The weight of the layer has the shape ``shape``."""
        assert config.weight is not None
        codes, qparams = quantizer_for(config.weight, activation=False).empty_codes(shape)
        inputs = None if config.input_tensors is None else quantizer_for(config.input_tensors, activation=True)
        is_static = inputs is not None and not inputs.is_dynamic and not inputs.is_float
        return cls(config, codes, qparams, inputs.empty_qparams((1,), "meta") if inputs is not None and is_static else None)

    def put_into(self, layer: QuantizedLayer, name: str, *, keeps_codes: bool) -> None:
        """Set the weight of ``layer`` to the dequantized codes, and the scales of ``layer`` to the stored
        scales.

        Args:
            layer: A layer with the same configuration. The new weight has the dtype of the layer's present
                weight, which may be on the meta device.
            name: Full name of ``layer``, for messages.
            keeps_codes: Whether the export writes these codes. If False, the export computes codes from the
                values of the layer's weight.

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
        """Set the scale of the input of ``layer`` if that scale is static.

        Raises:
            CheckpointError: The scale is not valid.
        """
        if self.input is not None and layer.input_quantizer is not None:
            qparams = self.input.map(lambda scale: scale.reshape(()))
            refuse_bad_scales(qparams, f"the input of '{name}'", activation=True)
            layer.input_quantizer.set_qparams(qparams)


def restored_parameter(quantizer: QuantizerModule, codes: Tensor, qparams: QParams, dtype: torch.dtype) -> nn.Parameter:
    """Dequantize the codes, and return the result as a parameter with the dtype ``dtype``.

    The function also sets the scales of ``quantizer`` to ``qparams``.
    """
    quantizer.set_qparams(qparams)
    return nn.Parameter(cast_finite(quantizer.quantizer.dequantize(codes, qparams), dtype), requires_grad=False)


def refuse_bad_scales(qparams: QParams, of: str, *, activation: bool) -> None:
    """Raise an error if a scale is not valid.

    If the scale of an activation is 0, the activation becomes infinite. If the scale of a weight's group is
    0, the group dequantizes to zeros. Other tools write a scale of 0 for a group of zeros, so this function
    only logs a warning if a scale of a weight is 0.

    Args:
        qparams: Unpacked scales of a checkpoint.
        of: A description of the tensor. Messages contain it.
        activation: Whether the tensor is an activation. If False, it is a parameter.

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
                "damaged, or values overflowed when it was quantized. Download the checkpoint again, or quantize the model again"
            )
        get_logger(__name__).warning(
            f"{zeros} of {values.numel()} scale(s) of {of} are 0: the groups with these scales dequantize to zeros"
        )


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
    """Set the scales of ``quantizer`` to the stored scales, and return the parameter that the checkpoint
    stores.

    The result is a dictionary from the parameter's name to the parameter. It is empty if the tensor is an
    activation. This function is the inverse of `stored_tensors`.

    Args:
        quantizer: Quantizer of one tensor of a layer.
        slot: The role of the tensor in the layer.
        tensors: A dictionary from suffix to stored tensor. Codes or values are in the layout of the layer.
        shape: Shape of the tensor in the layout that its quantizer expects.
        dtype: Dtype of the parameter.
        order: Packing order of 4-bit codes in a word, ``"reorder"`` or ``"order"``.
        name: Full name of the layer, for messages.
        holds_values: Whether the checkpoint stores the values of parameters instead of codes.

    Raises:
        CheckpointError: A scale is not valid, or the unpacked codes do not have the shape ``shape``.
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
        raise CheckpointError(f"the {slot} of '{name}' unpacks to the shape {list(codes.shape)} instead of {list(shape)}")
    refuse_bad_scales(qparams, f"the {slot} of '{name}'", activation=False)
    return {slot: restored_parameter(quantizer, codes, qparams, dtype)}


def as_parameter(tensor: Tensor) -> nn.Parameter:
    """Return ``tensor`` as a parameter without gradient.

    If ``tensor`` is a parameter, return it unchanged.
    """
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)


def stored_tensors(name: str, module: QuantizerModule, values: Tensor, order: str) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint stores for a quantized tensor.

    The result is a dictionary from suffix to tensor. The function checks every scale and a sample of the
    codes.

    Args:
        name: Full name of the quantized tensor, for messages.
        module: The quantizer with the scales.
        values: Values on the quantizer's grid, or float values if ``module.is_deferred``.
        order: Packing order of 4-bit codes in a word, ``"reorder"`` or ``"order"``.

    Raises:
        ConfigError: The values are not on the grid, because they were changed after rounding.
        PluginError: Codes that are packed and then unpacked are not equal to the original codes. The message
            names the number format.
    """
    quantizer, qparams = module.quantizer, module.qparams
    assert qparams is not None
    codes = module.codes_of(values.detach())
    complaint = _complaint(name, module, values.detach(), codes, order)
    tensors = quantizer.pack(codes, qparams, order=order)
    announced = packed_meta(quantizer, tuple(values.shape), order)
    if any(n in announced and (t.shape, t.dtype) != (announced[n].shape, announced[n].dtype) for n, t in tensors.items()):
        complaint = (
            "packs real tensors to other shapes or dtypes than meta tensors, but quark derives the layout of files from meta tensors"
        )
    if complaint is not None:
        raise origin("formats", quantizer.stored_level.format.name).error(f"{complaint} (at '{name}')")
    return tensors


def checked_codes(name: str, module: QuantizerModule, values: Tensor) -> Tensor:
    """Compute the codes of a quantized tensor, check a sample of the codes, and return all of them.

    Args:
        name: Full name of the quantized tensor, for messages.
        module: The quantizer with the scales.
        values: Values on the quantizer's grid.

    Raises:
        ConfigError: The values are not on the grid, because they were changed after rounding.
    """
    codes = module.codes_of(values.detach())
    _complaint(name, module, values.detach(), codes, "reorder")
    return codes


def _complaint(name: str, module: QuantizerModule, values: Tensor, codes: Tensor, order: str) -> str | None:
    """Return the reason why the number format cannot pack the codes, or None if it can.

    Raises:
        ConfigError: The codes do not represent the values exactly.
    """
    quantizer, qparams = module.quantizer, module.qparams
    assert qparams is not None
    complaint = codes_error(quantizer, qparams, values, codes, order, is_rounded=not module.is_deferred)
    if complaint is not None and complaint != LOSSY:
        names = [level.dtype.name for level in levels(quantizer.spec)]
        raise ConfigError(
            f"'{name}' cannot be stored as {' → '.join(names)}: it {complaint}. It was changed after it was quantized, or by a broken "
            "plugin. Quantize the model again"
        )
    return complaint


def packed_meta(quantizer: TensorQuantizer, shape: tuple[int, ...], order: str) -> dict[str, Tensor]:
    """Return meta tensors with the shapes and dtypes that a checkpoint stores for a quantized tensor.

    ``shape`` is the shape of the quantized tensor. The result is a dictionary from suffix to meta tensor.
    """
    return dict(_packed_meta(quantizer, shape, order))


def packed_scales(quantizer: TensorQuantizer, shape: tuple[int, ...], order: str) -> dict[str, Tensor]:
    """Return meta tensors with the shapes and dtypes that a checkpoint stores for the scales of an
    activation.

    ``shape`` is the shape of the activation. The result is a dictionary from suffix to meta tensor. It is
    empty if the scales are dynamic.
    """
    if quantizer.is_dynamic or quantizer.is_float:
        return {}
    return quantizer.pack_qparams(quantizer.empty_qparams(shape, "meta"), order=order)


@lru_cache(maxsize=1024)
def _packed_meta(quantizer: TensorQuantizer, shape: tuple[int, ...], order: str) -> dict[str, Tensor]:
    """Return the result of `packed_meta`, and cache it.

    The cache saves time, because many layers have the same shape. To pack meta tensors takes longer than to
    pack the real tensors of a small layer.
    """
    tensors = quantizer.pack(*quantizer.empty_codes(shape), order=order)
    if strange := [suffix for suffix in tensors if suffix and not suffix.isidentifier()]:
        raise origin("formats", quantizer.stored_level.format.name).error(
            f"packs a tensor under the suffix {strange[0]!r}, which no reader of checkpoints can find. Use only letters, digits and '_' in "
            "the suffix"
        )
    return tensors
