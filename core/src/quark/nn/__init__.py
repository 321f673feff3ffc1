"""Quantized modules."""

from quark.nn.layers import (
    LOOKUP_TYPES,
    QUANTIZED_TYPES,
    QuantConv2d,
    QuantConvTranspose2d,
    QuantEmbedding,
    QuantEmbeddingBag,
    QuantizedLayer,
    QuantLinear,
    is_quantized,
)
from quark.nn.quantizer_module import QuantizerModule

__all__ = [
    "LOOKUP_TYPES",
    "QUANTIZED_TYPES",
    "QuantConv2d",
    "QuantConvTranspose2d",
    "QuantEmbedding",
    "QuantEmbeddingBag",
    "QuantLinear",
    "QuantizedLayer",
    "QuantizerModule",
    "is_quantized",
]
