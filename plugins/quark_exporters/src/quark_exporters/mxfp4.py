"""Mxfp4Dequantizer: MXFP4 experts of gpt-oss.

Two codes are in a byte, low half first, and 32 codes share an E8M0 scale.

``<name>_blocks`` is ``[experts, O, I / 32, 16]`` and ``<name>_scales`` ``[experts, O, I / 32]``, both uint8.
The float tensor is ``[experts, I, O]``, as models of transformers hold fused experts of gpt-oss. Source:
``transformers.integrations.mxfp4``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quark.checkpoint import CodedLayer, FloatTensor, LayerCodes
from quark.config.layer import QLayerConfig
from quark.errors import CheckpointError
from quark.numbers import quantizer_for
from quark_exporters.compressed_tensors.arguments import spec_of
from quark_exporters.stored_codes import e2m1_values

__all__ = ["Mxfp4Dequantizer"]


_BLOCKS, _SCALES = "_blocks", "_scales"
_BYTES = 16
"""Bytes of a block of 32 codes."""
_BIAS, _NAN = 127, 255
_WEIGHT = {"type": "float", "num_bits": 4, "strategy": "group", "group_size": 2 * _BYTES}
"""Arguments of compressed-tensors for these weights."""


class Mxfp4Dequantizer:
    """Dequantizes checkpoints of gpt-oss, as `quark.checkpoint.Dequantizer`."""

    def float_tensors(self, block: Mapping[str, Any], stored: Mapping[str, Tensor]) -> Iterator[FloatTensor]:
        """As `quark.checkpoint.Dequantizer.float_tensors`."""
        for blocks, tensor in stored.items():
            if not blocks.endswith(_BLOCKS) or tensor.dtype is not torch.uint8:
                continue
            name = blocks.removesuffix(_BLOCKS)
            scales = name + _SCALES
            if tensor.ndim != 4 or tensor.shape[-1] != _BYTES or scales not in stored or stored[scales].shape != tensor.shape[:-1]:
                has = f"scales {list(stored[scales].shape)}" if scales in stored else "no scales"
                raise CheckpointError(
                    f"'{blocks}' {list(tensor.shape)} has {has}; MXFP4 experts have blocks [experts, O, I / 32, {_BYTES}] and scales "
                    "[experts, O, I / 32]: the checkpoint is damaged, or stored in another way"
                )
            experts, rows, groups, _ = tensor.shape
            shape = (experts, groups * 2 * _BYTES, rows)
            yield FloatTensor(
                name=name, shape=shape, sources=(blocks, scales), make=_maker(blocks, scales), layers=_layers(name, blocks, scales, shape)
            )


def _layers(name: str, blocks: str, scales: str, shape: tuple[int, int, int]) -> Iterator[LayerCodes]:
    """Yield the layer of each expert, as models have them that are taken apart."""
    experts, columns, rows = shape
    config = QLayerConfig(weight=spec_of(_WEIGHT, activation=False))
    assert config.weight is not None
    quantizer = quantizer_for(config.weight, activation=False)

    def read(expert: int, tensors: Mapping[str, Tensor]) -> CodedLayer:
        own = {"": tensors[blocks][expert].reshape(rows, -1), "scale": tensors[scales][expert]}
        return CodedLayer(config, *quantizer.unpack(own, (rows, columns)))

    owner, _, leaf = name.rpartition(".")
    for expert in range(experts):
        yield LayerCodes(name=f"{owner}.{expert}.{leaf}", config=config, shape=(rows, columns), read=partial(read, expert))


def _maker(blocks: str, scales: str) -> Any:
    return lambda tensors, dtype: _values(tensors[blocks], tensors[scales], dtype)


def _values(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values, ``[experts, I, O]``, one expert at a time."""
    experts, rows, groups, _ = blocks.shape
    values = torch.empty(experts, groups * 2 * _BYTES, rows, dtype=dtype, device=blocks.device)
    for expert in range(experts):
        exponents = scales[expert].int() - _BIAS
        powers = torch.exp2(exponents.float()).masked_fill_(scales[expert] == _NAN, torch.nan)
        matrix = e2m1_values(blocks[expert]).mul_(powers.unsqueeze(-1))
        values[expert] = matrix.view(rows, -1).t()
    return values
