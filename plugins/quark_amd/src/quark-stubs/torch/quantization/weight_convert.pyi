# Written by tools/public_stubs.py: run it again after a change of names; do not edit.
from quark.models.hf.conversion_ops import Chunk as Chunk
from quark.models.hf.conversion_ops import Concatenate as Concatenate
from quark.models.hf.conversion_ops import ConversionOps as ConversionOps
from quark.models.hf.conversion_ops import FuseExperts as FuseExperts
from quark.models.hf.conversion_ops import SplitFusedExperts as SplitFusedExperts
from quark.models.hf.conversion_ops import Transpose as Transpose
from quark.models.hf.weight_converters import WeightConverter as WeightConverter
from quark.models.hf.weight_converters import apply_converters as apply_converters
