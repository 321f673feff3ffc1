"""`Mxfp4Dequantizer` computes float weights from the MXFP4 experts of gpt-oss.

Each byte has two codes, with the first code in the low half. 32 codes share an E8M0 scale. An expert has O
output channels and I input channels.

The tensor ``<name>_blocks`` has the codes, uint8 ``[experts, O, I / 32, 16]``. The tensor ``<name>_scales``
has the scales, uint8 ``[experts, O, I / 32]``. The float tensor has the shape ``[experts, I, O]``, which
transformers uses for gpt-oss. Source: ``transformers.integrations.mxfp4``.
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
from quark.models.hf.missing_tensors import misfit
from quark_exporters.compressed_tensors.arguments import spec_of
from quark_exporters.stored_codes import weight_quantizer

__all__ = ["Mxfp4Dequantizer"]


_BLOCKS, _SCALES = "_blocks", "_scales"
_BYTES = 16
"""Number of bytes in a block of 32 codes."""
_WEIGHT = {"type": "float", "num_bits": 4, "strategy": "group", "group_size": 2 * _BYTES}
"""The quantization arguments with which compressed-tensors describes such weights."""


class Mxfp4Dequantizer:
    """The `quark.checkpoint.Dequantizer` for checkpoints of gpt-oss."""

    def float_tensors(self, block: Mapping[str, Any], stored: Mapping[str, Tensor]) -> Iterator[FloatTensor]:
        """Yield the float tensors of the checkpoint (see `quark.checkpoint.Dequantizer.float_tensors`)."""
        for blocks, tensor in stored.items():
            if not blocks.endswith(_BLOCKS) or tensor.dtype is not torch.uint8:
                continue
            name = blocks.removesuffix(_BLOCKS)
            scales = name + _SCALES
            wanted = torch.empty(tensor.shape[:-1], dtype=torch.uint8, device="meta")
            if tensor.ndim != 4 or tensor.shape[-1] != _BYTES or scales not in stored or misfit(stored[scales], wanted):
                has = f"scales {stored[scales].dtype} {list(stored[scales].shape)}" if scales in stored else "no scales"
                raise CheckpointError(
                    f"'{blocks}' {list(tensor.shape)} has {has}, but MXFP4 experts have blocks [experts, O, I / 32, {_BYTES}] and scales "
                    "[experts, O, I / 32]. The checkpoint is damaged or has another layout"
                )
            yield _float_tensor(name, blocks, scales, tuple(tensor.shape))


def _float_tensor(name: str, blocks: str, scales: str, stored: tuple[int, ...]) -> FloatTensor:
    """Return the float tensor of all experts.

    The attribute ``layers`` of the result has the codes of each expert. They are for models in which each
    expert is a module.
    """
    experts, rows, groups, _ = stored
    columns = groups * 2 * _BYTES
    config = QLayerConfig(weight=spec_of(_WEIGHT, activation=False))
    quantizer = weight_quantizer(config)

    def read(expert: int, tensors: Mapping[str, Tensor]) -> CodedLayer:
        own = {"": tensors[blocks][expert].reshape(rows, -1), "scale": tensors[scales][expert]}
        return CodedLayer(config, *quantizer.unpack(own, (rows, columns)))

    def make(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        values = torch.empty(experts, columns, rows, dtype=dtype, device=tensors[blocks].device)
        for expert in range(experts):
            coded = read(expert, tensors)
            values[expert] = quantizer.dequantize(coded.codes, coded.qparams).t()
        return values

    owner, _, leaf = name.rpartition(".")
    layers = (
        LayerCodes(name=f"{owner}.{expert}.{leaf}", config=config, shape=(rows, columns), read=partial(read, expert))
        for expert in range(experts)
    )
    return FloatTensor(name=name, shape=(experts, columns, rows), sources=(blocks, scales), make=make, layers=layers)
