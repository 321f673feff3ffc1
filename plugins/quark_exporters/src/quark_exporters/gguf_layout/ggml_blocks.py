"""Conversion of codes and scales to the bytes of GGML's quantized tensors.

Codes do not change. Scales are rounded to float16 if GGML needs it.

A row consists of blocks of 32 weights, and each block has a scale. ``q`` below stands for the 32 codes of a
block. Source: ``ggml-common.h`` and ``ggml-quants.c`` of llama.cpp; the ``gguf`` package reads the same
bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from quark.config.tensor import QTensorConfig
from quark.errors import UnsupportedError
from quark.numbers import PerBlock, PerGroupOfRows, QParams, TensorQuantizer

__all__ = ["BLOCK", "BlockType", "block_type_for"]

BLOCK = 32
"""Number of weights in a block."""


@attrs.frozen
class BlockType:
    """A quantized type of GGML.

    Attributes:
        name: Name of the type in `gguf.GGMLQuantizationType`.
        file_type: Name in `gguf.LlamaFileType` of files that mostly have this type.
        bytes_per_block: Number of bytes for a block of 32 weights.
        encode: Function that converts codes ``[O, I]``, and scales and zero points ``[O, I / 32]``, to bytes
            ``[O, I / 32, bytes_per_block]``.
        format: Name of the number format that has the same codes.
        has_zero_points: Whether the codes have zero points.
        scale_format: Required ``scale_format`` of the spec. None if any is allowed.
    """

    name: str
    file_type: str
    bytes_per_block: int
    encode: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    format: str
    has_zero_points: bool = False
    scale_format: str | None = None

    def row_bytes(self, columns: int) -> int:
        """Return the number of bytes of a row of ``columns`` weights."""
        return columns // BLOCK * self.bytes_per_block

    def packed(self, codes: Tensor, qparams: QParams) -> Tensor:
        """Return the bytes of a weight, uint8 ``[O, row_bytes(I)]``.

        Args:
            codes: Codes ``[O, I]``. ``I`` is a multiple of 32.
            qparams: One scale for the tensor, one for each row, or one for each group of columns. The size of
                groups is a multiple of 32.

        Raises:
            UnsupportedError: A scale is beyond the range of its stored type.
        """
        blocks = (codes.shape[0], codes.shape[1] // BLOCK)
        zero = None if qparams.zero_point is None else _of_blocks(qparams.zero_point, blocks)
        return self.encode(codes.contiguous(), _of_blocks(qparams.scale, blocks).float(), zero).flatten(1)


def block_type_for(quantizer: TensorQuantizer, shape: tuple[int, ...]) -> BlockType | None:
    """Return the type of GGML that can store the codes of a weight unchanged, or None if no type can.

    Args:
        quantizer: Quantizer of the weight.
        shape: Shape ``[O, I]`` of the weight, or of each weight if several are stacked.
    """
    levels = quantizer.levels if hasattr(quantizer, "levels") else (quantizer.stored_level,)
    granularity = quantizer.granularity
    if len(levels) > 1 or len(shape) != 2 or shape[1] % BLOCK or isinstance(granularity, PerBlock | PerGroupOfRows):
        return None
    scales = granularity.scale_shape(shape)
    if len(scales) == 2 and (shape[1] // scales[1]) % BLOCK:
        return None
    spec: QTensorConfig = levels[0].spec
    codes = levels[0].format.name, spec.symmetric is False
    of_codes = (kind for kind in _TYPES if (kind.format, kind.has_zero_points) == codes)
    return next((kind for kind in of_codes if kind.scale_format in (None, spec.scale_format)), None)


def _of_blocks(scales: Tensor, blocks: tuple[int, int]) -> Tensor:
    """Return one scale for each block. Scales that several blocks share are repeated."""
    per_row = scales.reshape(-1, 1) if scales.ndim < 2 else scales
    return per_row.repeat_interleave(blocks[1] // per_row.shape[1], 1).expand(blocks)


def _q4_0(codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Return blocks with the values ``w = d · (q − 8)``.

    A block has the scale d in float16, then 16 bytes of codes.
    """
    return torch.cat([_half(scale), _nibbles(codes.to(torch.int16) + 8)], -1)


def _q4_1(codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Return blocks with the values ``w = d · q + m``, where ``m = −d · zero point``.

    A block has the scale d and m in float16, then 16 bytes of codes. m is computed from d as stored in
    float16, so that the rounding errors of d and m do not add up.
    """
    assert zero is not None
    stored = scale.to(torch.float16).to(scale.dtype)
    return torch.cat([_half(scale), _half(-stored * zero), _nibbles(codes)], -1)


def _q8_0(codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Return blocks with the values ``w = d · q``.

    A block has the scale d in float16, then 32 signed bytes of codes.
    """
    return torch.cat([_half(scale), codes.reshape(len(codes), -1, BLOCK).view(torch.uint8)], -1)


def _mxfp4(codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Return blocks with the values ``w = 2^(e − 127) · FP4 value``.

    A block has a byte e, then 16 bytes of codes. Source: OCP Microscaling Formats 1.0.
    """
    mantissa, exponent = torch.frexp(scale)
    if not bool((mantissa == 0.5).all()):
        raise UnsupportedError("MXFP4 of GGML needs powers of two as scales: use a scheme with scales in E8M0")
    return torch.cat([(exponent + 126).to(torch.uint8)[..., None], _nibbles(codes)], -1)


def _nibbles(codes: Tensor) -> Tensor:
    """Return bytes with two codes each.

    The first 16 codes of a block are in the low halves, the others in the high.
    """
    low, high = codes.to(torch.uint8).reshape(len(codes), -1, 2, BLOCK // 2).unbind(2)
    return low | (high << 4)


def _half(values: Tensor) -> Tensor:
    half = values.to(torch.float16)
    if not bool(half.isfinite().all()) or bool(((half == 0) & (values != 0)).any()):
        raise UnsupportedError(
            f"scales from {float(values.abs().min()):.3g} to {float(values.abs().max()):.3g} do not fit into GGML's float16: leave the "
            f"layer in float (exclude_layers)"
        )
    return half.contiguous().view(torch.uint8).reshape(*values.shape, 2)


Q4_0 = BlockType("Q4_0", "MOSTLY_Q4_0", 18, _q4_0, "int4")
Q4_1 = BlockType("Q4_1", "MOSTLY_Q4_1", 20, _q4_1, "uint4", has_zero_points=True)
Q8_0 = BlockType("Q8_0", "MOSTLY_Q8_0", 34, _q8_0, "int8")
MXFP4 = BlockType("MXFP4", "MOSTLY_MXFP4_MOE", 17, _mxfp4, "fp4", scale_format="e8m0")
_TYPES = (Q4_0, Q4_1, Q8_0, MXFP4)
