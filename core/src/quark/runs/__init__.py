"""The quantization pipeline: a source loads blocks, the blocks are calibrated and rounded, and a sink
receives them.
"""

from quark.runs.from_disk import quantize_checkpoint
from quark.runs.model_quantizer import ModelQuantizer

__all__ = ["ModelQuantizer", "quantize_checkpoint"]
