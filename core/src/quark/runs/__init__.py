"""The one pipeline: a source of blocks, calibration in lock-step, rounding, a sink."""

from quark.runs.from_disk import quantize_checkpoint
from quark.runs.model_quantizer import ModelQuantizer

__all__ = ["ModelQuantizer", "quantize_checkpoint"]
