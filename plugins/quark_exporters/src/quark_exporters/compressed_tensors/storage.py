"""`CompressedTensorsStorage` stores a layer in the formats of compressed-tensors 0.20.

The package defines these formats in its folder ``compressors``. A weight has O output channels and I input
channels:

==========================  ==================================================================================
tensor                      contents
==========================  ==================================================================================
``weight_packed``           int32 ``[O, I · bits / 32]``: unsigned codes, the first in the lowest bits
                            (``pack-quantized``); or uint8 ``[O, I / 2]``: two FP4 codes, the first in the low
                            half (``mxfp4-pack-quantized``, ``nvfp4-pack-quantized``)
``weight``                  int8 or FP8 codes ``[O, I]`` (``int-quantized``, ``float-quantized``)
``weight_scale``            ``[1]``, ``[O, 1]``, ``[O, groups]`` or ``[O / rows, I / columns]``: float32, E8M0
                            (uint8) or E4M3
``weight_zero_point``       int8, in the shape of the scales; packed along O if the weight is packed
``weight_shape``            int64 ``[2]``: the shape ``O, I`` of the weight (``pack-quantized``)
``weight_global_scale``     ``[1]``: the E4M3 scales are *divided* by this number
``input_scale``             ``[1]``: the scale of a statically quantized input
``input_global_scale``      ``[1]``: for NVFP4, the divisor of the scales of the input
==========================  ==================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quark.checkpoint import CodedLayer
from quark.config.layer import QLayerConfig
from quark.errors import CheckpointError, UnsupportedError
from quark.numbers import QParams, TensorQuantizer
from quark_exporters.compressed_tensors.arguments import format_of
from quark_exporters.stored_codes import packed_words, short_block_of, unpacked_words, weight_quantizer

__all__ = ["CompressedTensorsStorage"]

_INTEGERS = ("int-quantized", "pack-quantized")
"""The formats whose codes are integers."""


class CompressedTensorsStorage:
    """The `quark.checkpoint.LayerStorage` for the layout of compressed-tensors."""

    def why_not(self, config: QLayerConfig, shape: tuple[int, ...]) -> str | None:
        """Return why the layout cannot store a layer (see `quark.checkpoint.LayerStorage.why_not`)."""
        try:
            format_of(config)
        except UnsupportedError as error:
            return str(error)
        return short_block_of(config, shape)

    def stored(self, layer: CodedLayer) -> dict[str, Tensor]:
        """Return the tensors to store for a layer (see `quark.checkpoint.LayerStorage.stored`)."""
        kind, quantizer = format_of(layer.config), weight_quantizer(layer.config)
        tensors = self._integers(layer, kind, quantizer) if kind in _INTEGERS else _floats(layer, kind, quantizer)
        if layer.input is not None:
            is_nvfp4 = kind.startswith("nvfp4")
            name = "input_global_scale" if is_nvfp4 else "input_scale"
            tensors[name] = _reciprocal(layer.input.scale) if is_nvfp4 else layer.input.scale.reshape(1)
        return tensors

    def _integers(self, layer: CodedLayer, kind: str, quantizer: TensorQuantizer) -> dict[str, Tensor]:
        bits = int(quantizer.stored_level.format.bits)
        shift = 0 if layer.codes.dtype is torch.uint8 else 2 ** (bits - 1)
        codes, scale = _moved(layer.codes, shift, torch.uint8), _as_matrix(layer.qparams.scale)
        zero_point = layer.qparams.zero_point
        zeros = None if zero_point is None else _moved(_as_matrix(zero_point), shift, torch.uint8)
        if kind == "int-quantized":
            tensors = {"weight": _moved(codes, -(2 ** (bits - 1)), torch.int8), "weight_scale": scale}
            return tensors if zeros is None else {**tensors, "weight_zero_point": _moved(zeros, -(2 ** (bits - 1)), torch.int8)}
        shape = torch.tensor(layer.codes.shape, dtype=torch.int64, device=codes.device)
        tensors = {"weight_packed": packed_words(codes, bits), "weight_scale": scale, "weight_shape": shape}
        if zeros is not None:
            tensors["weight_zero_point"] = packed_words(zeros.t(), bits).t().contiguous()
        return tensors

    def restored(self, config: QLayerConfig, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> CodedLayer:
        """Return the layer that stored tensors describe (see `quark.checkpoint.LayerStorage.restored`).

        Raises:
            CheckpointError: The tensor ``weight_shape`` differs from ``shape``.
        """
        kind, quantizer = format_of(config), weight_quantizer(config)
        scale_shape = quantizer.granularity.scale_shape(shape)
        if kind not in _INTEGERS:
            own = {"": tensors["weight" if "weight" in tensors else "weight_packed"], "scale": tensors["weight_scale"].reshape(scale_shape)}
            if "weight_global_scale" in tensors:
                own["scale_2"] = _reciprocal(tensors["weight_global_scale"]).reshape(())
            elif own["scale"].dtype is not torch.uint8:
                own["scale"] = own["scale"].float()
            codes, qparams = quantizer.unpack(own, shape)
            return CodedLayer(config, codes, qparams, _input(tensors))
        if "weight_shape" in tensors and tensors["weight_shape"].tolist() != list(shape):
            raise CheckpointError(
                f"'weight_shape' says {tensors['weight_shape'].tolist()}, but the weight is {list(shape)}. The checkpoint is damaged"
            )
        bits, dtype = int(quantizer.stored_level.format.bits), quantizer.stored_level.format.storage_dtype
        codes, zeros = _integer_codes(kind, bits, shape, tensors)
        scale = tensors["weight_scale"].float().reshape(scale_shape)
        shift = 0 if dtype is torch.uint8 else -(2 ** (bits - 1))
        zero_point = None if zeros is None else _moved(zeros, shift, torch.int32).reshape(scale_shape)
        return CodedLayer(config, _moved(codes, shift, dtype), QParams(scale, zero_point), _input(tensors))


def _floats(layer: CodedLayer, kind: str, quantizer: TensorQuantizer) -> dict[str, Tensor]:
    own = quantizer.pack(layer.codes, layer.qparams)
    if kind == "float-quantized":
        return {"weight": own[""], "weight_scale": _as_matrix(own["scale"]).float()}
    tensors = {"weight_packed": own[""], "weight_scale": own["scale"]}
    return {**tensors, "weight_global_scale": _reciprocal(own["scale_2"])} if "scale_2" in own else tensors


def _integer_codes(kind: str, bits: int, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return codes and zero points as uint8, shifted so that the smallest code is 0.

    The zero points are None if the checkpoint has none.
    """
    zeros = tensors.get("weight_zero_point")
    if kind == "int-quantized":
        half = 2 ** (bits - 1)
        return _moved(tensors["weight"], half, torch.uint8), None if zeros is None else _moved(zeros, half, torch.uint8)
    codes = unpacked_words(tensors["weight_packed"], bits, shape[1])
    return codes, None if zeros is None else unpacked_words(zeros.t(), bits, shape[0]).t()


def _as_matrix(scale: Tensor) -> Tensor:
    """Return scales as a matrix with an axis for rows and an axis for columns.

    A single scale gets the shape ``[1]`` instead.
    """
    return scale.reshape(1) if scale.ndim == 0 else scale.unsqueeze(1) if scale.ndim == 1 else scale


def _reciprocal(scale: Tensor) -> Tensor:
    """Return 1 / ``scale`` as a float32 tensor of the shape ``[1]``.

    This converts a factor to a divisor, or a divisor to a factor.
    """
    return (1.0 / scale.float()).reshape(1)


def _input(tensors: Mapping[str, Tensor]) -> QParams | None:
    if "input_global_scale" in tensors:
        return QParams(_reciprocal(tensors["input_global_scale"]))
    return QParams(tensors["input_scale"].float()) if "input_scale" in tensors else None


def _moved(codes: Tensor, by: int, dtype: torch.dtype) -> Tensor:
    """Add ``by`` to codes or zero points, and return the sum in ``dtype``."""
    return (codes.to(torch.int16) + by).to(dtype)
