"""``quark.torch.quantization.weight_convert``: AMD Quark's weight converters."""

from __future__ import annotations

from quark.hf.conversion_ops import Chunk, Concatenate, ConversionOps, FuseExperts, SplitFusedExperts, Transpose
from quark.hf.weight_converters import WeightConverter, apply_converters

__all__ = [
    "Chunk",
    "Concatenate",
    "ConversionOps",
    "FuseExperts",
    "SplitFusedExperts",
    "Transpose",
    "WeightConverter",
    "apply_converters",
]
