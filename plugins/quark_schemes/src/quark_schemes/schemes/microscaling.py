"""OCP Microscaling schemes: MXFP4, MXFP6 and mixtures."""

from __future__ import annotations

from quark.config.layer import QLayerConfig
from quark.config.tensor import QTensorConfig
from quark_schemes.specs.float8 import FP8E4M3PerTensorSpec
from quark_schemes.specs.microscaling import OCP_MXFP4Spec, OCP_MXFP6E2M3Spec, OCP_MXFP6E3M2Spec, OCP_MXSpec

__all__ = ["mxfp4", "mxfp4_fp8", "mxfp4_mxfp6_e2m3", "mxfp4_weight_only", "mxfp6_e2m3", "mxfp6_e3m2"]


def _weight(helper: type[OCP_MXSpec]) -> QTensorConfig:
    return helper(ch_axis=-1, is_dynamic=False).to_quantization_spec()


def _activation(helper: type[OCP_MXSpec]) -> QTensorConfig:
    return helper(ch_axis=-1, is_dynamic=True).to_quantization_spec()


def mxfp4_weight_only() -> QLayerConfig:
    """Return a configuration of MXFP4 weights."""
    return QLayerConfig(weight=_weight(OCP_MXFP4Spec))


def mxfp4() -> QLayerConfig:
    """Return a configuration of MXFP4 weights and dynamic MXFP4 activations."""
    return QLayerConfig(weight=_weight(OCP_MXFP4Spec), input_tensors=_activation(OCP_MXFP4Spec))


def mxfp6_e3m2() -> QLayerConfig:
    """Return a configuration of MXFP6 weights and dynamic activations of E3M2 elements."""
    return QLayerConfig(weight=_weight(OCP_MXFP6E3M2Spec), input_tensors=_activation(OCP_MXFP6E3M2Spec))


def mxfp6_e2m3() -> QLayerConfig:
    """Return a configuration of MXFP6 weights and dynamic activations of E2M3 elements."""
    return QLayerConfig(weight=_weight(OCP_MXFP6E2M3Spec), input_tensors=_activation(OCP_MXFP6E2M3Spec))


def mxfp4_mxfp6_e2m3() -> QLayerConfig:
    """Return a configuration of MXFP4 weights, dynamic MXFP6 activations of E2M3 elements."""
    return QLayerConfig(weight=_weight(OCP_MXFP4Spec), input_tensors=_activation(OCP_MXFP6E2M3Spec))


def mxfp4_fp8() -> QLayerConfig:
    """Return a configuration of MXFP4 weights, static E4M3 activations with one scale."""
    return QLayerConfig(weight=_weight(OCP_MXFP4Spec), input_tensors=FP8E4M3PerTensorSpec(is_dynamic=False).to_quantization_spec())
