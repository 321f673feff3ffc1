"""The one pipeline: a source of blocks, calibration in lock-step, rounding, a sink."""

from quark.pipeline.model_quantizer import ModelQuantizer

__all__ = ["ModelQuantizer"]
