"""FP8 schemes."""

from __future__ import annotations

from quark.config.layer import QLayerConfig
from quark.config.tensor import QTensorConfig
from quark_schemes.specs.float8 import FP8E4M3PerChannelSpec, FP8E4M3PerTensorSpec

__all__ = ["fp8", "fp8_outputs", "ptpc_fp8"]


def fp8() -> QLayerConfig:
    """Return a configuration of E4M3 weights and static activations, one scale each."""
    spec = FP8E4M3PerTensorSpec(scale_type="float", is_dynamic=False).to_quantization_spec()
    return QLayerConfig(weight=spec, input_tensors=spec)


def fp8_outputs() -> QTensorConfig:
    """Return a configuration of E4M3 with one static scale, for what a cache or an attention holds."""
    return FP8E4M3PerTensorSpec(is_dynamic=False).to_quantization_spec()


def ptpc_fp8() -> QLayerConfig:
    """Return a configuration of E4M3 weights with a scale for each output channel, dynamic E4M3 activations with a scale for each token."""
    weight = FP8E4M3PerChannelSpec(ch_axis=0, is_dynamic=False).to_quantization_spec()
    return QLayerConfig(weight=weight, input_tensors=FP8E4M3PerChannelSpec(ch_axis=1, is_dynamic=True).to_quantization_spec())
