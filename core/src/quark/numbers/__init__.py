"""Base classes of number formats, packing, observers, tensor quantizers and weight grids, and the code that
computes with them."""

from quark.numbers.column_rounder import ColumnRounder, GroupScales
from quark.numbers.from_spec import canonicalize, format_of, level_quantizer, number_format, observer_class, packed_dtype, quantizer_for
from quark.numbers.granularity import (
    Granularity,
    PerBlock,
    PerChannel,
    PerGroup,
    PerGroupOfRows,
    PerPaddedGroup,
    PerTensor,
    PerToken,
    granularity_of,
)
from quark.numbers.number_format import NumberFormat, Packing, QParams, Spacing
from quark.numbers.observer import Observer
from quark.numbers.rounded_grid import RoundedGrid
from quark.numbers.single_level import TILE_ELEMENTS
from quark.numbers.tensor_quantizer import TensorQuantizer
from quark.numbers.tensor_views import ChannelsLast, KernelMatrix, TensorView, ViewedQuantizer, output_first_shape, viewed
from quark.numbers.tiles import cast_finite
from quark.numbers.weight_grid import WeightGrid

__all__ = [
    "TILE_ELEMENTS",
    "ChannelsLast",
    "ColumnRounder",
    "Granularity",
    "GroupScales",
    "KernelMatrix",
    "NumberFormat",
    "Observer",
    "Packing",
    "PerBlock",
    "PerChannel",
    "PerGroup",
    "PerGroupOfRows",
    "PerPaddedGroup",
    "PerTensor",
    "PerToken",
    "QParams",
    "RoundedGrid",
    "Spacing",
    "TensorQuantizer",
    "TensorView",
    "ViewedQuantizer",
    "WeightGrid",
    "canonicalize",
    "cast_finite",
    "format_of",
    "granularity_of",
    "level_quantizer",
    "number_format",
    "observer_class",
    "output_first_shape",
    "packed_dtype",
    "quantizer_for",
    "viewed",
]
