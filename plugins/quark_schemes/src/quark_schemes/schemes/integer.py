"""INT4, UINT4 and INT8 schemes."""

from __future__ import annotations

from quark.config.layer import QLayerConfig
from quark_schemes.specs.integer import Int4PerChannelSpec, Int4PerGroupSpec, Int8PerTensorSpec, Uint4PerChannelSpec, Uint4PerGroupSpec

__all__ = [
    "int4_wa_64",
    "int4_weight_and_activation",
    "int4_weight_only",
    "int4_wo_32",
    "int4_wo_64",
    "int4_wo_128",
    "int4_wo_per_channel",
    "int8",
    "uint4_weight_only",
    "uint4_wo_32",
    "uint4_wo_64",
    "uint4_wo_128",
    "uint4_wo_per_channel",
]


def int4_weight_only(group_size: int) -> QLayerConfig:
    """Return a configuration of symmetric INT4 weights in groups along the input."""
    return QLayerConfig(weight=Int4PerGroupSpec(ch_axis=-1, group_size=group_size, is_dynamic=False).to_quantization_spec())


def uint4_weight_only(group_size: int) -> QLayerConfig:
    """Return a configuration of asymmetric UINT4 weights in groups along the input."""
    return QLayerConfig(weight=Uint4PerGroupSpec(ch_axis=-1, group_size=group_size, is_dynamic=False).to_quantization_spec())


def int4_wo_32() -> QLayerConfig:
    """Return a configuration of INT4 weights, groups of 32."""
    return int4_weight_only(32)


def int4_wo_64() -> QLayerConfig:
    """Return a configuration of INT4 weights, groups of 64."""
    return int4_weight_only(64)


def int4_wo_128() -> QLayerConfig:
    """Return a configuration of INT4 weights, groups of 128."""
    return int4_weight_only(128)


def int4_wo_per_channel() -> QLayerConfig:
    """Return a configuration of INT4 weights, a scale for each output channel."""
    return QLayerConfig(weight=Int4PerChannelSpec(ch_axis=0, is_dynamic=False).to_quantization_spec())


def int4_weight_and_activation(group_size: int) -> QLayerConfig:
    """Return a configuration of symmetric INT4 weights and dynamic INT4 activations, in groups."""
    activation = Int4PerGroupSpec(ch_axis=-1, group_size=group_size, is_dynamic=True).to_quantization_spec()
    return QLayerConfig(weight=int4_weight_only(group_size).weight, input_tensors=activation)


def int4_wa_64() -> QLayerConfig:
    """Return a configuration of INT4 weights and dynamic INT4 activations, groups of 64."""
    return int4_weight_and_activation(64)


def uint4_wo_32() -> QLayerConfig:
    """Return a configuration of UINT4 weights, groups of 32."""
    return uint4_weight_only(32)


def uint4_wo_64() -> QLayerConfig:
    """Return a configuration of UINT4 weights, groups of 64."""
    return uint4_weight_only(64)


def uint4_wo_128() -> QLayerConfig:
    """Return a configuration of UINT4 weights, groups of 128."""
    return uint4_weight_only(128)


def uint4_wo_per_channel() -> QLayerConfig:
    """Return a configuration of UINT4 weights, a scale and a zero point for each output channel."""
    return QLayerConfig(weight=Uint4PerChannelSpec(ch_axis=0, is_dynamic=False).to_quantization_spec())


def int8() -> QLayerConfig:
    """Return a configuration of symmetric INT8 weights and static activations, one scale each."""
    spec = Int8PerTensorSpec(is_dynamic=False).to_quantization_spec()
    return QLayerConfig(weight=spec, input_tensors=spec)
