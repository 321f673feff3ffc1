"""Number formats, packing, observers, tensor quantizers and the grid of a weight: protocols, and the engine that serves them all."""

from quark.quantizers.build import canonicalize, format_of, level_quantizer, number_format, observer_class, packed_dtype, quantizer_for
from quark.quantizers.column_rounder import ColumnRounder
from quark.quantizers.finite import cast_finite
from quark.quantizers.granularity import Granularity, PerBlock, PerChannel, PerGroup, PerTensor, PerToken, granularity_of
from quark.quantizers.group_scales import GroupScales
from quark.quantizers.multi_level import MultiLevelQuantizer
from quark.quantizers.number_format import NumberFormat, Spacing
from quark.quantizers.observer import Observer
from quark.quantizers.packing import Packing
from quark.quantizers.qparams import QParams
from quark.quantizers.rounded_grid import RoundedGrid
from quark.quantizers.single_level import TILE_ELEMENTS
from quark.quantizers.tensor_quantizer import TensorQuantizer
from quark.quantizers.viewed import ChannelsLast, KernelMatrix, TensorView, ViewedQuantizer, output_first_shape, viewed
from quark.quantizers.weight_grid import WeightGrid

__all__ = [
    "TILE_ELEMENTS",
    "ChannelsLast",
    "ColumnRounder",
    "Granularity",
    "GroupScales",
    "KernelMatrix",
    "MultiLevelQuantizer",
    "NumberFormat",
    "Observer",
    "Packing",
    "PerBlock",
    "PerChannel",
    "PerGroup",
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
