"""`CompressedTensorsDequantizer` computes float weights from checkpoints of compressed-tensors.

It also supports some checkpoints that `CompressedTensorsReader` cannot load.

`quark_exporters.compressed_tensors.storage` describes the tensors of a layer. The dequantizer also reads
packed integers of 1 and 2 bits, and weights whose columns were sorted by activation size before they were
grouped. Such a weight has a tensor ``weight_g_idx`` ``[I]`` with the group of each column. Source:
compressed-tensors 0.20, ``compressors``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from quark.checkpoint import FloatTensor, LayerCodes
from quark.checkpoint.layer_storage import layer_codes, meta_tensors
from quark.config.fields import value_of
from quark.config.layer import QLayerConfig
from quark.errors import CheckpointError, UnsupportedError
from quark_exporters.compressed_tensors.arguments import group_of, layer_config, refuse_other_transforms
from quark_exporters.compressed_tensors.storage import CompressedTensorsStorage
from quark_exporters.linear_layers import cache_scales, refuse_others
from quark_exporters.stored_codes import ScaleBlocks, e2m1_values, unpacked_words

__all__ = ["CompressedTensorsDequantizer"]

_WORD = 32
_CODES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
_BESIDE = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point", "weight_observer")


class CompressedTensorsDequantizer:
    """The `quark.checkpoint.Dequantizer` for checkpoints of compressed-tensors."""

    def float_tensors(self, block: Mapping[str, Any], stored: Mapping[str, Tensor]) -> Iterator[FloatTensor]:
        """Yield the float tensors of the checkpoint (see `quark.checkpoint.Dequantizer.float_tensors`)."""
        refuse_other_transforms(block)
        configs: list[QLayerConfig] = []
        for name, tensor in stored.items():
            layer, _, leaf = name.rpartition(".")
            if leaf == "weight_packed":
                arguments = group_of(block, layer)["weights"]
                is_float = value_of(arguments, "type", str, "int") == "float"
                one = _fp4(layer, stored) if is_float else _packed(layer, stored, arguments)
            elif leaf == "weight" and tensor.dtype in _CODES and f"{layer}.weight_scale" in stored:
                one = _unpacked(layer, stored, group_of(block, layer)["weights"])
            else:
                continue
            yield attrs.evolve(one, layers=_layers(block, layer, one, stored, configs))


def _layers(
    block: Mapping[str, Any], layer: str, one: FloatTensor, stored: Mapping[str, Tensor], configs: list[QLayerConfig]
) -> tuple[LayerCodes, ...]:
    """Return the stored codes of a layer, so that quark can use them instead of quantizing the layer again.

    Return an empty tuple if the reader does not support the scheme of the layer. ``configs`` collects
    configurations, so that layers with equal configurations share one object. If the configuration of the
    layer is new, this function adds it.
    """
    try:
        config = layer_config(block, layer, stored)
    except UnsupportedError:
        return ()
    if config not in configs:
        configs.append(config)
    announced = dict(meta_tensors(CompressedTensorsStorage(), config, one.shape))
    if value_of(group_of(block, layer)["weights"], "block_structure", list):  # `ScaleBlocks` has checked the shape of the scales
        announced["weight_scale"] = announced["weight_scale"].new_empty(stored[f"{layer}.weight_scale"].shape)
    # A checkpoint may store zero points for symmetric codes too. They are all 0.
    refuse_others(layer, stored, announced, may_be=("weight_zero_point",))
    inputs = [name for name in one.left_out if name.startswith(f"{layer}.input_")]
    names = {name.rpartition(".")[2]: name for name in (*one.sources, *inputs)}
    return layer_codes(layer, configs[configs.index(config)], one.shape, CompressedTensorsStorage(), names)


def _packed(layer: str, stored: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> FloatTensor:
    packed, scale, zero_point, shape, order = (
        f"{layer}.{leaf}" for leaf in ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
    )
    bits, is_symmetric = value_of(arguments, "num_bits", int, 8), value_of(arguments, "symmetric", bool, True)
    if bits not in (1, 2, 4, 8):
        raise UnsupportedError(
            f"'{layer}' has packed codes of {bits} bits, but quark reads only 1, 2, 4 and 8 bits. Use the float checkpoint as the source"
        )
    _expect(scale, stored)
    codes = stored[packed]
    if codes.dtype is not torch.int32 or codes.ndim != 2 or (stored[scale].ndim != 2 and stored[scale].numel() != 1):
        raise CheckpointError(
            f"'{packed}' is {codes.dtype} {list(codes.shape)}, not int32 [O, I / codes per word]. The checkpoint is damaged"
        )
    per_word = _WORD // bits
    groups = stored[scale].shape[-1] if stored[scale].ndim == 2 else 1
    size = arguments.get("group_size")
    size = size if isinstance(size, int) and size > 0 else None
    # With one scale per row, the number of columns follows from the number of words. `make` compares it with
    # the stored shape.
    columns = codes.shape[1] * per_word if size is None else groups * size
    rows = codes.shape[0]
    if -(-columns // per_word) != codes.shape[1]:
        raise CheckpointError(
            f"'{packed}' {list(codes.shape)} and {groups} groups of {size} columns do not match. The checkpoint is damaged"
        )
    blocks = ScaleBlocks.of(packed, (rows, columns), tuple(stored[scale].shape))
    if not is_symmetric:
        _expect(zero_point, stored)
    sources = [packed, scale, *(name for name in (shape, order, zero_point) if name in stored)]

    def make(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        if shape in tensors and tensors[shape].tolist() != [rows, columns]:
            raise ValueError(f"'{shape}' says {tensors[shape].tolist()}, but the codes and scales have the shape {[rows, columns]}")
        integers = _signed_codes(tensors[packed], bits, columns)
        zeros = _signed_codes(tensors[zero_point].t(), bits, rows).t() if zero_point in tensors else None
        zeros = _shifting(zeros, is_symmetric=is_symmetric)
        if order in tensors and bool((tensors[order] >= 0).all()):
            group = tensors[order].long()
            of_columns = ScaleBlocks((rows, columns), 1, 1)
            return of_columns.values(integers, tensors[scale][:, group], None if zeros is None else zeros[:, group], dtype)
        return blocks.values(integers, tensors[scale], zeros, dtype)

    return FloatTensor(
        name=f"{layer}.weight",
        shape=(rows, columns),
        sources=tuple(sources),
        make=make,
        left_out=_beside(layer, stored),
    )


def _unpacked(layer: str, stored: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> FloatTensor:
    weight, scale, zero_point = f"{layer}.weight", f"{layer}.weight_scale", f"{layer}.weight_zero_point"
    shape = tuple(stored[weight].shape)
    block: Any = arguments.get("block_structure")
    is_block = isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)
    blocks = ScaleBlocks.of(weight, shape, tuple(stored[scale].shape), (block[0], block[1]) if is_block else None)
    is_symmetric = value_of(arguments, "symmetric", bool, True)
    if not is_symmetric and stored[weight].dtype is torch.int8:
        _expect(zero_point, stored)

    def make(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        zeros = _shifting(tensors.get(zero_point), is_symmetric=is_symmetric)
        return blocks.values(tensors[weight], tensors[scale], zeros, dtype)

    return FloatTensor(
        name=weight,
        shape=shape,
        sources=(weight, scale, *([zero_point] if zero_point in stored else ())),
        make=make,
        left_out=_beside(layer, stored),
    )


def _shifting(zeros: Tensor | None, *, is_symmetric: bool) -> Tensor | None:
    """Return the zero points ``zeros``, or None if ``is_symmetric`` is true.

    Raise ValueError if ``is_symmetric`` is true and a zero point is not 0.
    """
    if is_symmetric and zeros is not None and bool((zeros != 0).any()):
        raise ValueError("quantization_config says that the layer has no zero points, but the checkpoint stores zero points other than 0")
    return None if is_symmetric else zeros


def _fp4(layer: str, stored: Mapping[str, Tensor]) -> FloatTensor:
    packed, scale, outer = (f"{layer}.{leaf}" for leaf in ("weight_packed", "weight_scale", "weight_global_scale"))
    _expect(scale, stored)
    if stored[packed].dtype is not torch.uint8 or stored[packed].ndim != 2:
        raise CheckpointError(
            f"'{packed}' is {stored[packed].dtype} {list(stored[packed].shape)}, not uint8 [O, I / 2]. The FP4 checkpoint is damaged"
        )
    rows, columns = stored[packed].shape[0], 2 * stored[packed].shape[-1]
    blocks = ScaleBlocks.of(packed, (rows, columns), tuple(stored[scale].shape))

    def make(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        scales = tensors[scale]
        if outer in tensors:  # multiply by the reciprocal of the divisor, as a loaded model does
            scales = scales.float() * (1.0 / tensors[outer].float())
        return blocks.values(e2m1_values(tensors[packed]), scales, None, dtype)

    sources = (packed, scale, *([outer] if outer in stored else ()))
    return FloatTensor(name=f"{layer}.weight", shape=(rows, columns), sources=sources, make=make, left_out=_beside(layer, stored))


def _signed_codes(words: Tensor, bits: int, columns: int) -> Tensor:
    """Unpack words ``[rows, n]`` into signed codes ``[rows, columns]``.

    A word has several stored numbers of ``bits`` bits. The stored number 2^(bits − 1) becomes the code 0.
    """
    return unpacked_words(words, bits, columns).to(torch.int16).sub_(2 ** (bits - 1))


def _beside(layer: str, stored: Mapping[str, Tensor]) -> tuple[str, ...]:
    return (*(name for leaf in _BESIDE if (name := f"{layer}.{leaf}") in stored), *cache_scales(layer, stored))


def _expect(name: str, stored: Mapping[str, Tensor]) -> None:
    if name not in stored:
        raise CheckpointError(f"the checkpoint lacks '{name}', so the layer cannot be dequantized. Download the checkpoint again")
