"""Schemes with two-level scales, or with weights that are quantized twice."""

from __future__ import annotations

from quark.config.layer import QLayerConfig
from quark_schemes.specs.float8 import FP8E4M3PerTensorSpec, FP8E5M3PerTensorSpec
from quark_schemes.specs.integer import Int4PerChannelSpec
from quark_schemes.specs.microscaling import AmdFP4Spec, FP4PerGroupSpec
from quark_schemes.specs.options import SingleLevelSpec
from quark_schemes.specs.two_level import ProgressiveSpec, ScaleQuantSpec

__all__ = [
    "amdfp4",
    "amdfp4_g32",
    "amdfp4_global16",
    "amdfp4_global32",
    "amdfp4_in_groups",
    "amdfp4_with_global_scale",
    "int4_fp8",
    "nvfp4",
]


def _fp4_under(scales: SingleLevelSpec, group_size: int) -> QLayerConfig:
    """Return a configuration of FP4 in groups, scales in the format of ``scales``; those of activations dynamic under a static one."""
    weight, activation = (
        ScaleQuantSpec(FP4PerGroupSpec(ch_axis=-1, group_size=group_size, is_dynamic=dynamic, scale_type="float32"), scales)
        for dynamic in (False, True)
    )
    return QLayerConfig(weight=weight.to_quantization_spec(), input_tensors=activation.to_quantization_spec())


def nvfp4() -> QLayerConfig:
    """Return a configuration of FP4 in groups of 16, E4M3 scales, one scale per tensor over them."""
    return _fp4_under(FP8E4M3PerTensorSpec(scale_type="float32", is_dynamic=False), 16)


def amdfp4_with_global_scale(group_size: int) -> QLayerConfig:
    """Return a configuration of FP4 in groups of 16 or 32, E5M3 scales, one scale per tensor over them."""
    return _fp4_under(FP8E5M3PerTensorSpec(scale_type="float32", is_dynamic=False), group_size)


def amdfp4_global16() -> QLayerConfig:
    """Return a configuration of FP4 in groups of 16, E5M3 scales, one scale per tensor over them."""
    return amdfp4_with_global_scale(16)


def amdfp4_global32() -> QLayerConfig:
    """Return a configuration of FP4 in groups of 32, E5M3 scales, one scale per tensor over them."""
    return amdfp4_with_global_scale(32)


def amdfp4_in_groups(group_size: int = 16) -> QLayerConfig:
    """Return a configuration of FP4 weights and dynamic activations in groups of 16 or 32 with E5M3 scales."""
    weight, activation = (AmdFP4Spec(ch_axis=-1, group_size=group_size, is_dynamic=dynamic) for dynamic in (False, True))
    return QLayerConfig(weight=weight.to_quantization_spec(), input_tensors=activation.to_quantization_spec())


def amdfp4() -> QLayerConfig:
    """Return a configuration of FP4 weights and dynamic activations, groups of 16, E5M3 scales."""
    return amdfp4_in_groups(16)


def amdfp4_g32() -> QLayerConfig:
    """Return a configuration of FP4 weights and dynamic activations, groups of 32, E5M3 scales."""
    return amdfp4_in_groups(32)


def int4_fp8() -> QLayerConfig:
    """Return a configuration of weights in E4M3, one scale, and from there in INT4, a scale per channel; dynamic E4M3 activations."""
    first = FP8E4M3PerTensorSpec(scale_type="float32", is_dynamic=False)
    weight = ProgressiveSpec(first, Int4PerChannelSpec(ch_axis=0, scale_type="float32", is_dynamic=False))
    activation = FP8E4M3PerTensorSpec(scale_type="float32", is_dynamic=True)
    return QLayerConfig(weight=weight.to_quantization_spec(), input_tensors=activation.to_quantization_spec())
