"""Functions that turn codes and scales into the bytes of GGML's quantized tensors.

The codes do not change. The scales are rounded to float16 if the GGML type stores them in float16.

A weight has O rows of I elements. A row consists of blocks of 32 elements, and each block has a scale. In
this module, ``q`` stands for the 32 codes of a block. Source: ``ggml-common.h`` and ``ggml-quants.c`` of
llama.cpp. The ``gguf`` package reads the bytes too.
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
    """A GGML type for quantized tensors.

    Attributes:
        name: Name of the type in `gguf.GGMLQuantizationType`.
        file_type: Name in `gguf.LlamaFileType` for a file in which most weights have this type.
        bytes_per_block: Number of bytes in a block of 32 weights.
        encode: Function that returns the bytes ``[O, I / 32, bytes_per_block]``. Its first two arguments are
            codes ``[O, I]`` and scales ``[O, I / 32]``. Its third argument is None, or zero points in the
            shape of the scales.
        format: Name of quark's number format with the same codes.
        has_zero_points: Whether the codes have zero points.
        scale_format: The scale format that the type requires, or None if the type accepts every scale format.
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
            codes: Codes ``[O, I]``. ``I`` must be a multiple of 32.
            qparams: Scales and zero points: one for the tensor, one for each row, or one for each group. The
                group size must be a multiple of 32.

        Raises:
            UnsupportedError: GGML stores scales in a type whose range does not include one of the scales.
        """
        blocks = (codes.shape[0], codes.shape[1] // BLOCK)
        zero = None if qparams.zero_point is None else _of_blocks(qparams.zero_point, blocks)
        return self.encode(codes.contiguous(), _of_blocks(qparams.scale, blocks).float(), zero).flatten(1)


def block_type_for(quantizer: TensorQuantizer, shape: tuple[int, ...]) -> BlockType | None:
    """Return the GGML type that stores the codes of a weight without change; None if there is no such type.

    Args:
        quantizer: Quantizer of the weight.
        shape: Shape ``[O, I]`` of the weight. If several weights are stacked, the shape of one of them.
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
    """Repeat scales so that each block has one.

    In ``scales``, a scale may belong to several blocks, to a row, or to the whole tensor.
    """
    per_row = scales.reshape(-1, 1) if scales.ndim < 2 else scales
    return per_row.repeat_interleave(blocks[1] // per_row.shape[1], 1).expand(blocks)


def _q4_0(codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Return Q4_0 blocks, in which a weight is ``w = d · (q − 8)`` with the scale d and the code q.

    A block has d in float16 and 16 bytes of codes.
    """
    return torch.cat([_half(scale), _nibbles(codes.to(torch.int16) + 8)], -1)


def _q4_1(codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Return Q4_1 blocks, in which a weight is ``w = d · q + m`` with the scale d and the code q.

    A block has d in float16, m = −d · zero point in float16, and 16 bytes of codes. m is computed from the
    float16 value of d. If it were computed from the original scale, the rounding errors of d and m would add
    up.
    """
    assert zero is not None
    stored = scale.to(torch.float16).to(scale.dtype)
    return torch.cat([_half(scale), _half(-stored * zero), _nibbles(codes)], -1)


def _q8_0(codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Return Q8_0 blocks, in which a weight is ``w = d · q`` with the scale d and the code q.

    A block has d in float16 and 32 signed bytes of codes.
    """
    return torch.cat([_half(scale), codes.reshape(len(codes), -1, BLOCK).view(torch.uint8)], -1)


def _mxfp4(codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Return MXFP4 blocks, in which a weight is 2^(e − 127) · the value of an FP4 code.

    A block has the exponent e of its scale in one byte, and 16 bytes of codes.

    Source: OCP Microscaling Formats 1.0.
    """
    mantissa, exponent = torch.frexp(scale)
    if not bool((mantissa == 0.5).all()):
        raise UnsupportedError("MXFP4 of GGML needs scales that are powers of two. Use a scheme with scales in E8M0")
    return torch.cat([(exponent + 126).to(torch.uint8)[..., None], _nibbles(codes)], -1)


def _nibbles(codes: Tensor) -> Tensor:
    """Pack two codes into each byte.

    The first 16 codes of a block are in the low halves, the others in the high halves.
    """
    low, high = codes.to(torch.uint8).reshape(len(codes), -1, 2, BLOCK // 2).unbind(2)
    return low | (high << 4)


def _half(values: Tensor) -> Tensor:
    half = values.to(torch.float16)
    if not bool(half.isfinite().all()) or bool(((half == 0) & (values != 0)).any()):
        raise UnsupportedError(
            f"scales from {float(values.abs().min()):.3g} to {float(values.abs().max()):.3g} are out of the range of "
            f"float16, in which GGML stores them. Leave the layer in float (exclude_layers)"
        )
    return half.contiguous().view(torch.uint8).reshape(*values.shape, 2)


Q4_0 = BlockType("Q4_0", "MOSTLY_Q4_0", 18, _q4_0, "int4")
Q4_1 = BlockType("Q4_1", "MOSTLY_Q4_1", 20, _q4_1, "uint4", has_zero_points=True)
Q8_0 = BlockType("Q8_0", "MOSTLY_Q8_0", 34, _q8_0, "int8")
MXFP4 = BlockType("MXFP4", "MOSTLY_MXFP4_MOE", 17, _mxfp4, "fp4", scale_format="e8m0")
_TYPES = (Q4_0, Q4_1, Q8_0, MXFP4)
