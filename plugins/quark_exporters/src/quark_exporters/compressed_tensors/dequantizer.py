"""CompressedTensorsDequantizer: weights of compressed-tensors in the formats ``pack-quantized``, ``int-quantized`` and ``float-quantized``.

======================  =================================================================================================================
tensor of a layer       contents
======================  =================================================================================================================
``weight_packed``       int32 ``[O, I · bits / 32]``: codes + 2^(bits - 1), the first in the lowest bits (``pack-quantized``)
``weight``              int8 or FP8 codes ``[O, I]`` (the other formats)
``weight_scale``        one, ``[O, 1]``, ``[O, groups]``, or one for each block of rows and columns
``weight_zero_point``   as the scales; packed along O where the weight is packed; only where codes are asymmetric
``weight_shape``        ``[O, I]`` as two numbers
``weight_g_idx``        ``[I]``: group of each column, where columns were grouped by their activations
======================  =================================================================================================================

Source: compressed-tensors 0.20, ``compressors``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from quark.checkpoint import FloatTensor
from quark.errors import CheckpointError
from quark_exporters.compressed_tensors.scheme import WeightArguments, refuse_other_transforms, weight_arguments
from quark_exporters.scale_blocks import ScaleBlocks

__all__ = ["CompressedTensorsDequantizer"]

_WORD = 32
_CODES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
_BESIDE = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point", "weight_observer")


class CompressedTensorsDequantizer:
    """Dequantizes checkpoints of compressed-tensors, as `quark.checkpoint.Dequantizer`."""

    def float_tensors(self, block: Mapping[str, Any], stored: Mapping[str, Tensor]) -> Iterator[FloatTensor]:
        """As `quark.checkpoint.Dequantizer.float_tensors`."""
        refuse_other_transforms(block)
        for name, tensor in stored.items():
            layer, _, leaf = name.rpartition(".")
            if leaf == "weight_packed":
                yield _packed(layer, stored, weight_arguments(block, layer))
            elif leaf == "weight" and tensor.dtype in _CODES and f"{layer}.weight_scale" in stored:
                yield _unpacked(layer, stored, weight_arguments(block, layer))


def _packed(layer: str, stored: Mapping[str, Tensor], arguments: WeightArguments) -> FloatTensor:
    packed, scale, zero_point, shape, order = (
        f"{layer}.{leaf}" for leaf in ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
    )
    arguments.refuse_unpackable(layer)
    _expect(scale, stored)
    codes = stored[packed]
    if codes.dtype is not torch.int32 or codes.ndim != 2 or (stored[scale].ndim != 2 and stored[scale].numel() != 1):
        raise CheckpointError(f"'{packed}' is {codes.dtype} {list(codes.shape)}, and int32 [O, I / codes in a word] is expected")
    per_word = _WORD // arguments.bits
    groups = stored[scale].shape[-1] if stored[scale].ndim == 2 else 1
    # Of scales of whole rows the number of columns is that of the words, which the stored shape has to confirm.
    columns = groups * arguments.group_size if arguments.group_size else codes.shape[1] * per_word
    rows = codes.shape[0]
    if -(-columns // per_word) != codes.shape[1]:
        raise CheckpointError(
            f"'{packed}' {list(codes.shape)} and {groups} groups of {arguments.group_size} columns do not fit each other: it is damaged"
        )
    blocks = ScaleBlocks.of(packed, (rows, columns), tuple(stored[scale].shape))
    sources = [packed, scale, *(name for name in (shape, order) if name in stored)]
    if not arguments.symmetric:
        _expect(zero_point, stored)
        sources.append(zero_point)

    def make(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        if shape in tensors and tensors[shape].tolist() != [rows, columns]:
            raise ValueError(f"'{shape}' says {tensors[shape].tolist()}, and {[rows, columns]} follows from the words and scales")
        integers = _unpack(tensors[packed], arguments.bits)[:, :columns]
        zeros = None
        if zero_point in tensors:
            zeros = _unpack(tensors[zero_point].t().contiguous(), arguments.bits).t()[:rows]
        if order in tensors and bool((tensors[order] >= 0).all()):
            group_of = tensors[order].long()
            of_columns = ScaleBlocks((rows, columns), 1, 1)
            return of_columns.values(integers, tensors[scale][:, group_of], None if zeros is None else zeros[:, group_of], dtype)
        return blocks.values(integers, tensors[scale], zeros, dtype)

    return FloatTensor(
        name=f"{layer}.weight",
        shape=(rows, columns),
        sources=tuple(sources),
        make=make,
        left_out=_beside(layer, stored) + ((zero_point,) if zero_point in stored and arguments.symmetric else ()),
    )


def _unpacked(layer: str, stored: Mapping[str, Tensor], arguments: WeightArguments) -> FloatTensor:
    weight, scale, zero_point = f"{layer}.weight", f"{layer}.weight_scale", f"{layer}.weight_zero_point"
    shape = tuple(stored[weight].shape)
    blocks = ScaleBlocks.of(weight, shape, tuple(stored[scale].shape), arguments.block)
    is_shifted = not arguments.symmetric and zero_point in stored
    return FloatTensor(
        name=weight,
        shape=shape,
        sources=(weight, scale, *([zero_point] if is_shifted else ())),
        make=lambda tensors, dtype: blocks.values(tensors[weight], tensors[scale], tensors.get(zero_point), dtype),
        left_out=_beside(layer, stored) + ((zero_point,) if zero_point in stored and not is_shifted else ()),
    )


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Return the codes in words ``[rows, n]`` as int8 ``[rows, n · 32 / bits]``, signed."""
    if bits == _WORD // 4:
        return (words.view(torch.uint8).int() - 2 ** (bits - 1)).to(torch.int8)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=words.device)
    codes = (words.contiguous().view(torch.uint8).unsqueeze(-1) >> shifts) & (2**bits - 1)
    return codes.view(torch.int8).sub_(2 ** (bits - 1)).view(words.shape[0], math.prod(codes.shape[1:]))


def _beside(layer: str, stored: Mapping[str, Tensor]) -> tuple[str, ...]:
    return tuple(name for leaf in _BESIDE if (name := f"{layer}.{leaf}") in stored)


def _expect(name: str, stored: Mapping[str, Tensor]) -> None:
    if name not in stored:
        raise CheckpointError(f"the checkpoint has no '{name}', without which its layer cannot be dequantized: fetch it again")
