"""Numerics: number formats, observers and tensor quantizers; protocols and the machinery that serves them all."""

from quark.numerics.finite import cast_finite
from quark.numerics.format import NumberFormat
from quark.numerics.granularity import Granularity, PerBlock, PerChannel, PerGroup, PerTensor, PerToken, granularity_of
from quark.numerics.grid import GroupScales, WeightGrid
from quark.numerics.observer import Observer
from quark.numerics.qparams import QParams
from quark.numerics.quantizer import TensorQuantizer
from quark.numerics.resolve import format_of, number_format, observer_class, packed_dtype, quantizer_for, settled
from quark.numerics.stage import TILE_ELEMENTS

__all__ = [
    "TILE_ELEMENTS",
    "Granularity",
    "GroupScales",
    "NumberFormat",
    "Observer",
    "PerBlock",
    "PerChannel",
    "PerGroup",
    "PerTensor",
    "PerToken",
    "QParams",
    "TensorQuantizer",
    "WeightGrid",
    "cast_finite",
    "format_of",
    "granularity_of",
    "number_format",
    "observer_class",
    "packed_dtype",
    "quantizer_for",
    "settled",
]
