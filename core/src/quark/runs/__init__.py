"""The quantization pipeline: a source of blocks, calibration in lock-step, rounding, and a sink."""

from quark.runs.from_disk import quantize_checkpoint
from quark.runs.model_quantizer import ModelQuantizer

__all__ = ["ModelQuantizer", "quantize_checkpoint"]
