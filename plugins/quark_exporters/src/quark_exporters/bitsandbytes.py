"""`BitsAndBytesDequantizer` computes float weights from the INT8 checkpoints of bitsandbytes.

A layer has three tensors. ``weight`` has the int8 codes, with a row for each output channel. ``SCB`` has the
largest magnitude of each row, in float32. A value is ``code · SCB / 127``. ``weight_format`` describes the
arrangement of rows in memory. In files, ``weight_format`` is always 0. Source:
``bitsandbytes.functional.int8_vectorwise_dequant`` of bitsandbytes 0.50.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quark.checkpoint import FloatTensor
from quark.errors import CheckpointError, UnsupportedError
from quark_exporters.stored_codes import ScaleBlocks

__all__ = ["BitsAndBytesDequantizer"]

_LARGEST = 127


class BitsAndBytesDequantizer:
    """The `quark.checkpoint.Dequantizer` for INT8 checkpoints of bitsandbytes."""

    def float_tensors(self, block: Mapping[str, Any], stored: Mapping[str, Tensor]) -> Iterator[FloatTensor]:
        """Yield the float tensors of the checkpoint (see `quark.checkpoint.Dequantizer.float_tensors`)."""
        if block.get("load_in_8bit") is not True:
            raise UnsupportedError(
                "quark does not read 4-bit checkpoints of bitsandbytes. Dequantize the model with transformers (model.dequantize())"
            )
        for name in stored:
            if name.endswith(".SCB"):
                yield _float_tensor(name.removesuffix(".SCB"), stored)


def _float_tensor(layer: str, stored: Mapping[str, Tensor]) -> FloatTensor:
    codes, scale, form = (f"{layer}.{leaf}" for leaf in ("weight", "SCB", "weight_format"))
    if codes not in stored:
        raise CheckpointError(f"the checkpoint lacks '{codes}', so the layer cannot be dequantized. Download the checkpoint again")
    weight = stored[codes]
    if (weight.dtype, weight.ndim) != (torch.int8, 2) or stored[scale].numel() != weight.shape[0]:
        said = ", ".join(f"{name.rpartition('.')[2]} {stored[name].dtype} {list(stored[name].shape)}" for name in (codes, scale))
        raise CheckpointError(f"'{layer}' has {said}, which do not match. The checkpoint is damaged")
    shape = tuple(weight.shape)
    left_out = (form,) if form in stored else ()
    return FloatTensor(name=codes, shape=shape, sources=(codes, scale), make=partial(_values, codes, scale), left_out=left_out)


def _values(codes: str, scale: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    rows = len(tensors[codes])
    return ScaleBlocks((rows, 1), 1, 1).values(tensors[codes], tensors[scale].float() / _LARGEST, None, dtype)
