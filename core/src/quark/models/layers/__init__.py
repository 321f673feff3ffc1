"""Quantized layers, and the modules and functions that they need."""

from quark.models.layers.convolutions import (
    QuantConv1d,
    QuantConv2d,
    QuantConv3d,
    QuantConvTranspose1d,
    QuantConvTranspose2d,
    QuantConvTranspose3d,
    QuantizedConvolution,
)
from quark.models.layers.quantized_layers import (
    Branch,
    QuantConv1D,
    QuantEmbedding,
    QuantEmbeddingBag,
    QuantizedLayer,
    QuantLinear,
    counts_as,
    have_same_weight,
    is_quantized,
    linear_weight,
    quantized_class,
    share_codes,
)
from quark.models.layers.quantizer_module import QuantizerModule, RoundedParameter

__all__ = [
    "Branch",
    "QuantConv1D",
    "QuantConv1d",
    "QuantConv2d",
    "QuantConv3d",
    "QuantConvTranspose1d",
    "QuantConvTranspose2d",
    "QuantConvTranspose3d",
    "QuantEmbedding",
    "QuantEmbeddingBag",
    "QuantLinear",
    "QuantizedConvolution",
    "QuantizedLayer",
    "QuantizerModule",
    "RoundedParameter",
    "counts_as",
    "have_same_weight",
    "is_quantized",
    "linear_weight",
    "quantized_class",
    "share_codes",
]
