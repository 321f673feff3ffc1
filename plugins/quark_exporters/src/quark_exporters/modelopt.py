"""`ModelOptDequantizer` computes float weights from the FP8 and NVFP4 checkpoints of NVIDIA ModelOpt.

An FP8 layer is stored as `quark_exporters.fp8` describes, with one scale for the whole weight. An NVFP4 layer
with O output channels and I input channels has these tensors:

==================  ==========================================================
tensor              contents
==================  ==========================================================
``weight``          uint8 ``[O, I / 2]``: two FP4 codes, first in low half
``weight_scale``    E4M3 ``[O, I / 16]``: a scale for 16 columns
``weight_scale_2``  float32, one element that multiplies all scales
==================  ==========================================================

Source: ``modelopt/torch/quantization/qtensor/nvfp4_tensor.py`` of ModelOpt 0.47.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from quark.checkpoint import FloatTensor
from quark.errors import CheckpointError, UnsupportedError
from quark_exporters.fp8 import Fp8Dequantizer
from quark_exporters.linear_layers import cache_scales
from quark_exporters.stored_codes import ScaleBlocks, e2m1_values

__all__ = ["ModelOptDequantizer"]

_ALGORITHMS = ("FP8", "NVFP4")
_GROUP = 16


class ModelOptDequantizer:
    """The `quark.checkpoint.Dequantizer` for checkpoints of ModelOpt."""

    def float_tensors(self, block: Mapping[str, Any], stored: Mapping[str, Tensor]) -> Iterator[FloatTensor]:
        """Yield the float tensors of the checkpoint (see `quark.checkpoint.Dequantizer.float_tensors`)."""
        algorithm = block.get("quant_algo")
        if algorithm not in _ALGORITHMS:
            raise UnsupportedError(
                f"quark does not read ModelOpt checkpoints with quant_algo={algorithm!r}. Use a checkpoint with {' or '.join(_ALGORITHMS)}"
            )
        if algorithm == "FP8":
            yield from Fp8Dequantizer().float_tensors({"quant_method": "fp8", "activation_scheme": "static"}, stored)
            return
        for name in stored:
            if name.endswith(".weight_scale_2"):
                yield _fp4(name.removesuffix(".weight_scale_2"), stored)


def _fp4(layer: str, stored: Mapping[str, Tensor]) -> FloatTensor:
    codes, scale, outer = (f"{layer}.{leaf}" for leaf in ("weight", "weight_scale", "weight_scale_2"))
    if missing := [name for name in (codes, scale) if name not in stored]:
        raise CheckpointError(f"the checkpoint lacks '{missing[0]}', so the layer cannot be dequantized. Download the checkpoint again")
    rows, half = (*stored[codes].shape, 0, 0)[:2]
    shapes = (stored[codes].ndim, tuple(stored[scale].shape), stored[outer].numel())
    kinds = (stored[codes].dtype, stored[scale].dtype, stored[outer].dtype)
    if shapes != (2, (rows, 2 * half // _GROUP), 1) or kinds != (torch.uint8, torch.float8_e4m3fn, torch.float32) or 2 * half % _GROUP:
        said = ", ".join(f"{name.rpartition('.')[2]} {stored[name].dtype} {list(stored[name].shape)}" for name in (codes, scale, outer))
        raise CheckpointError(f"'{layer}' has {said}, which is not an NVFP4 layer. The checkpoint is damaged")
    blocks = ScaleBlocks((rows, 2 * half // _GROUP), 1, _GROUP)

    def make(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return blocks.values(e2m1_values(tensors[codes]), tensors[scale].float() * tensors[outer], None, dtype)

    if f"{layer}.pre_quant_scale" in stored:
        raise UnsupportedError(
            f"'{layer}' has a pre_quant_scale for its input, which quark does not read. Use a checkpoint that was quantized without AWQ"
        )
    left_out = (*(name for name in [f"{layer}.input_scale"] if name in stored), *cache_scales(layer, stored))
    return FloatTensor(name=codes, shape=(rows, 2 * half), sources=(codes, scale, outer), make=make, left_out=left_out)
