# Written by tools/public_stubs.py: run it again after a change of names; do not edit.
from quark.models.hf.weight_converters import Chunk as Chunk
from quark.models.hf.weight_converters import SplitFusedExperts as SplitFusedExperts
from transformers.core_model_loading import Concatenate as Concatenate
from transformers.core_model_loading import ConversionOps as ConversionOps
from transformers.core_model_loading import SkipParameters as SkipParameters
from transformers.core_model_loading import Transpose as Transpose
from transformers.core_model_loading import WeightConverter as WeightConverter
from transformers.core_model_loading import WeightTransform as WeightTransform
from transformers.core_model_loading import process_target_pattern as process_target_pattern
