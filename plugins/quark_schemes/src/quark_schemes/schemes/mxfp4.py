"""MXFP4 schemes."""

from __future__ import annotations

from quark.specs.layer import QLayerConfig
from quark_schemes.specs.microscaling import OCP_MXFP4Spec


def mxfp4_weight_only() -> QLayerConfig:
    """MXFP4 weights."""
    return QLayerConfig(weight=OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False).to_quantization_spec())


def mxfp4() -> QLayerConfig:
    """MXFP4 weights and dynamic MXFP4 activations."""
    return QLayerConfig(weight=mxfp4_weight_only().weight, input_tensors=OCP_MXFP4Spec(ch_axis=-1, is_dynamic=True).to_quantization_spec())
