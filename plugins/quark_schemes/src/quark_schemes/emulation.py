"""Emulation of MX formats in plain torch.

The functions have the same names, arguments and shapes as functions of AMD Quark. Runtimes import these
functions to emulate MX formats on hardware without MX support.

All functions accept any device and rank, do not change their arguments, do not synchronize with the device,
and can be traced in one graph by ``torch.compile``. They round exactly as the number formats of this package
do, so a runtime computes exactly the model that was calibrated and exported.

All functions view a tensor as *blocks* ``[R, N, G]``. The quantized axis is split into N blocks of G
elements, and the last block is padded with zeros. The other axes form R rows.

Source: the functions that vLLM's emulation of MX formats calls; OCP Microscaling Formats v1.0.
"""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch
from torch import Tensor

from quark.config.enums import Dtype
from quark.errors import ConfigError, UnsupportedError
from quark_schemes.arithmetic.packing import pack_bits, unpack_bits
from quark_schemes.arithmetic.shared_exponent import decode_e8m0, shared_exponent_scale
from quark_schemes.arithmetic.small_float import E2M1, E2M3, E3M2, E4M3, E5M2, FloatShape, decode_small, encode_small, round_small_
from quark_schemes.scale_formats import SMALLEST_SCALE

__all__ = [
    "PackedFloats",
    "create_pack_method",
    "dequantize_fp4_fp6_per_group",
    "dq_mxfp4",
    "even_round",
    "fake_quantize_fp4_fp6_per_group_with_scale",
    "qdq_mxfp4",
    "reshape_to_blocks",
]

_BLOCK = 32
_PACKED: dict[str, FloatShape] = {"fp4": E2M1, "fp6_e2m3": E2M3, "fp6_e3m2": E3M2}
_SHAPES: dict[str, FloatShape] = {**_PACKED, "fp8_e4m3": E4M3, "fp8_e5m2": E5M2}
_LOWEST_SCALE, _HIGHEST_SCALE = 2.0**-127, 2.0**127


def dq_mxfp4(x: Tensor, scale: Tensor, float_dtype: torch.dtype) -> Tensor:
    """Dequantize packed MXFP4 codes: ``[…, K / 2] → […, K]``.

    Args:
        x: Packed codes, uint8. The element at an even index is in the low half of a byte.
        scale: The scales as E8M0 bytes, one for each block of 32 elements: ``[…, ceil(K / 32)]``. A byte is
            the exponent + 127, or 255 for NaN. The dtype is uint8 or torch's E8M0 dtype.
        float_dtype: Dtype of the result, which may be any float dtype. Values that this dtype cannot
            represent are rounded once.

    Raises:
        ConfigError: The number of scales differs from the number of blocks.
    """
    length = 2 * x.shape[-1]
    blocks = -(-length // _BLOCK)
    if tuple(scale.shape) != (*x.shape[:-1], blocks):
        raise ConfigError(f"dq_mxfp4: codes of shape {tuple(x.shape)} need scales {(*x.shape[:-1], blocks)}, not {tuple(scale.shape)}")
    data = torch.nn.functional.pad(x, (0, -x.shape[-1] % (_BLOCK // 2))) if length % _BLOCK else x
    # Bfloat16 represents every product exactly, because its exponents have the range of the scales.
    values = _pairs(data).reshape(*scale.shape, _BLOCK)
    values = values.mul_(decode_e8m0(scale.view(torch.uint8)).bfloat16().unsqueeze(-1))
    return values.reshape(*x.shape[:-1], blocks * _BLOCK)[..., :length].to(float_dtype).contiguous()


def _pairs(data: Tensor) -> Tensor:
    """Return the values of the two FP4 codes in each byte, as a flat bfloat16 tensor."""
    # A table look-up yields both values as one int32, which is several times as fast as unpacking nibbles.
    codes = unpack_bits(torch.arange(256, dtype=torch.uint8, device=data.device).unsqueeze(-1), 4, 2, signed=False)
    table = decode_small(codes, E2M1).bfloat16().view(torch.int32).squeeze(-1)
    return table.index_select(0, data.reshape(-1).int()).view(torch.bfloat16)


def qdq_mxfp4(x: Tensor, scale_calculation_mode: str = "even") -> Tensor:
    """Quantize ``x`` to MXFP4 in blocks of 32 along the last axis, dequantize the result and return it.

    The result has the shape and dtype of ``x``, and no gradient.

    Args:
        x: A tensor of any float dtype and rank.
        scale_calculation_mode: See `quark_schemes.arithmetic.shared_exponent.shared_exponent_scale`.

    Raises:
        ConfigError: The mode is unknown.
    """
    blocks = reshape_to_blocks(x.detach(), _BLOCK, -1).float()
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = shared_exponent_scale(amax, scale_calculation_mode, E2M1.mantissa_bits, E2M1.largest_exponent, E2M1.largest)
    return _from_blocks(round_small_(blocks / scale, E2M1).mul_(scale), x.shape, -1).to(x.dtype)


def even_round(max_abs: Tensor, dtype: str | Dtype) -> Tensor:
    """Return the scale of each block, a power of two that the mode ``"even"`` chooses.

    The result is float32 in ``[2^-127, 2^127]`` and has the shape of ``max_abs``. NaN stays NaN.

    Args:
        max_abs: Largest magnitude of each block, any float dtype.
        dtype: Element format: fp4, fp6_e2m3, fp6_e3m2, fp8_e4m3 or fp8_e5m2.

    Raises:
        UnsupportedError: ``dtype`` is not one of these element formats.
    """
    shape = _shape(dtype, _SHAPES, "even_round")
    amax = max_abs.detach().float()
    scale = shared_exponent_scale(amax, "even", shape.mantissa_bits, shape.largest_exponent)
    # As in AMD Quark, the result is clamped to the ends of the E8M0 range. The quantizers of this project
    # return the smallest normal number for a block of zeros, and Inf for infinite magnitudes.
    return torch.where(amax == 0, _LOWEST_SCALE, scale.clamp(max=_HIGHEST_SCALE))


def reshape_to_blocks(x: Tensor, block_size: int, axis: int) -> Tensor:
    """Return ``x`` as blocks ``[R, N, block_size]``. The dtype does not change.

    The function swaps ``axis`` with the last axis, and then splits the last axis into blocks.
    """
    rows = x.transpose(axis, -1)
    rows = rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])
    if rows.shape[-1] % block_size:
        rows = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % block_size))
    return rows.reshape(rows.shape[0], rows.shape[1] // block_size, block_size)


def _from_blocks(blocks: Tensor, shape: torch.Size, axis: int) -> Tensor:
    """Undo `reshape_to_blocks`: return ``blocks`` as a tensor of ``shape``."""
    swapped = list(shape)
    swapped[axis], swapped[-1] = swapped[-1], swapped[axis]
    rows = blocks.reshape(blocks.shape[0], blocks.shape[1] * blocks.shape[2])
    return rows[:, : swapped[-1]].reshape(swapped).transpose(axis, -1)


def _scale_of(blocks: Tensor, scale: Tensor, caller: str) -> Tensor:
    """Return the scales as float32 ``[R, N, 1]``, with one scale per block.

    Raise ConfigError if the number of scales differs from the number of blocks.
    """
    rows, count, _ = blocks.shape
    if scale.numel() != rows * count:
        raise ConfigError(
            f"{caller}: {rows} rows of {count} blocks need one scale for each block, but the scales have the shape {tuple(scale.shape)}"
        )
    return scale.float().reshape(rows, count, 1)


def fake_quantize_fp4_fp6_per_group_with_scale(
    input_tensor: Tensor, scale: Tensor, axis: int, group_size: int, quant_dtype: str | Dtype, **_: Any
) -> Tensor:
    """Quantize ``input_tensor`` with the given scales, dequantize the result and return it.

    Values are rounded half to even and saturate. The result has the shape and dtype of ``input_tensor``, and
    no gradient.

    Args:
        input_tensor: A tensor of any float dtype and rank.
        scale: Scales as ``[R, N]`` or ``[R, N, 1]``, one for each block of ``group_size`` elements along
            ``axis``. A scale of 0 is replaced by 2^-23.
        axis: The axis that is split.
        group_size: Number of elements that share a scale.
        quant_dtype: fp4, fp6_e2m3 or fp6_e3m2.

    Raises:
        ConfigError: The number of scales differs from the number of blocks.
        UnsupportedError: ``quant_dtype`` is not one of these element formats.
    """
    shape = _shape(quant_dtype, _PACKED, "fake_quantize_fp4_fp6_per_group_with_scale")
    blocks = reshape_to_blocks(input_tensor.detach(), group_size, axis).float()
    scales = _scale_of(blocks, scale.detach(), "fake_quantize_fp4_fp6_per_group_with_scale")
    scales = torch.where(scales == 0, SMALLEST_SCALE, scales)
    return _from_blocks(round_small_(blocks / scales, shape).mul_(scales), input_tensor.shape, axis).to(input_tensor.dtype)


def dequantize_fp4_fp6_per_group(inputs: Tensor, scale: Tensor, axis: int, group_size: int, **_: Any) -> Tensor:
    """Return ``inputs`` multiplied by the scales of their blocks, with unchanged shape and dtype.

    Args:
        inputs: The values of codes before scaling, as ``create_pack_method(…).unpack`` returns them.
        scale: Scales. Their shape is the shape of ``inputs``, but ``axis`` has one element per block. An
            additional axis of size 1 may follow ``axis``.
        axis: The axis that is split.
        group_size: Number of elements that share a scale.

    Raises:
        ConfigError: The number of scales differs from the number of blocks.
    """
    blocks = reshape_to_blocks(inputs, group_size, axis).float()
    if scale.dim() == inputs.dim() + 1:
        scale = scale.squeeze(axis % inputs.dim() + 1)
    scales = _scale_of(blocks, scale.transpose(axis, -1), "dequantize_fp4_fp6_per_group")
    return _from_blocks(blocks * scales, inputs.shape, axis).to(inputs.dtype).contiguous()


@attrs.frozen
class PackedFloats:
    """Packs the values of a small float format into bytes along the last axis, and unpacks them.

    Two FP4 codes fill one byte; four FP6 codes fill three bytes.
    """

    shape: FloatShape

    def pack(self, to_pack: Tensor, reorder: bool = False) -> Tensor:
        """Encode and pack values that the format represents exactly, and return uint8 bytes.

        The shape is ``[…, K] → […, K / 2]`` for FP4, and ``[…, K] → […, 3 K / 4]`` for FP6.

        ``reorder`` is ignored.
        """
        return pack_bits(encode_small(to_pack.detach().float(), self.shape), self.shape.bits)

    def unpack(self, to_unpack: Tensor, reorder: bool = False, origin_packed_axis_size: int | None = None) -> Tensor:
        """Return the float32 values of packed bytes.

        If ``origin_packed_axis_size`` is given, the last axis of the result has this length. ``reorder`` is
        ignored.
        """
        length = to_unpack.shape[-1] * 8 // self.shape.bits if origin_packed_axis_size is None else origin_packed_axis_size
        return decode_small(unpack_bits(to_unpack, self.shape.bits, length, signed=False), self.shape)


def create_pack_method(qscheme: str | None, dtype: str | Dtype, mx_element_dtype: str | None = None) -> PackedFloats:
    """Return an object that packs values of ``dtype`` as a checkpoint stores them.

    The other arguments are ignored.

    Raises:
        UnsupportedError: The format is not fp4, fp6_e2m3 or fp6_e3m2.
    """
    return _METHODS[_shape(dtype, _PACKED, "create_pack_method")]


_METHODS = {shape: PackedFloats(shape) for shape in _PACKED.values()}


def _shape(dtype: str | Dtype, known: dict[str, FloatShape], caller: str) -> FloatShape:
    name = dtype.value if isinstance(dtype, Dtype) else dtype
    if name not in known:
        raise UnsupportedError(f"{caller} does not know the format {name!r}: use one of {', '.join(known)}")
    return known[name]
