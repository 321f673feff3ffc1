"""Quantized modules."""

from quark.modules.layers import (
    QuantConv1D,
    QuantConv2d,
    QuantConvTranspose2d,
    QuantEmbedding,
    QuantEmbeddingBag,
    QuantizedLayer,
    QuantLinear,
    counts_as,
    is_quantized,
    linear_weight,
    quantized_class,
)
from quark.modules.quantizer_module import QuantizerModule

__all__ = [
    "QuantConv1D",
    "QuantConv2d",
    "QuantConvTranspose2d",
    "QuantEmbedding",
    "QuantEmbeddingBag",
    "QuantLinear",
    "QuantizedLayer",
    "QuantizerModule",
    "counts_as",
    "is_quantized",
    "linear_weight",
    "quantized_class",
]
