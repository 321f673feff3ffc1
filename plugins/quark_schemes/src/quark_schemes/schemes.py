"""The named schemes: callables that build a new layer configuration, and classes with AMD Quark's names.

The callables come in this order: integers, FP8, OCP Microscaling (MX), formats with two levels of scales
(NVFP4, AMD FP4, INT4 of FP8), and block floating point. The classes come last. An object of a class has the
layer configuration as the attribute ``config``. This module does not import torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from quark.config.layer import QLayerConfig, TensorSpec
from quark.config.templates import QuantizationScheme
from quark.config.tensor import QTensorConfig
from quark_schemes.specs.floats import FP8E4M3PerChannelSpec, FP8E4M3PerTensorSpec, FP8E5M3PerTensorSpec
from quark_schemes.specs.integer import (
    Int2PerGroupSpec,
    Int3PerGroupSpec,
    Int4PerChannelSpec,
    Int4PerGroupSpec,
    Int8PerChannelSpec,
    Int8PerGroupSpec,
    Int8PerTensorSpec,
    Uint4PerChannelSpec,
    Uint4PerGroupSpec,
)
from quark_schemes.specs.microscaling import (
    AmdFP4Spec,
    BFP16Spec,
    FP4PerGroupSpec,
    MX6Spec,
    MX9Spec,
    OCP_MXFP4Spec,
    OCP_MXFP6E2M3Spec,
    OCP_MXFP6E3M2Spec,
    OCP_MXSpec,
)
from quark_schemes.specs.options import ProgressiveSpec, ScaleQuantSpec, SingleLevelSpec


def int4_weight_only(group_size: int) -> QLayerConfig:
    """Return a configuration of symmetric INT4 weights in groups along the input."""
    return QLayerConfig(weight=Int4PerGroupSpec(ch_axis=-1, group_size=group_size, is_dynamic=False).to_quantization_spec())


def uint4_weight_only(group_size: int) -> QLayerConfig:
    """Return a configuration of asymmetric UINT4 weights in groups along the input."""
    return QLayerConfig(weight=Uint4PerGroupSpec(ch_axis=-1, group_size=group_size, is_dynamic=False).to_quantization_spec())


def int3_weight_only(group_size: int) -> QLayerConfig:
    """Return a configuration of symmetric INT3 weights in groups along the input."""
    return QLayerConfig(weight=Int3PerGroupSpec(ch_axis=-1, group_size=group_size, is_dynamic=False).to_quantization_spec())


def int2_weight_only(group_size: int) -> QLayerConfig:
    """Return a configuration of symmetric INT2 weights in groups along the input."""
    return QLayerConfig(weight=Int2PerGroupSpec(ch_axis=-1, group_size=group_size, is_dynamic=False).to_quantization_spec())


def int8_weight_only(group_size: int) -> QLayerConfig:
    """Return a configuration of symmetric INT8 weights in groups along the input."""
    return QLayerConfig(weight=Int8PerGroupSpec(symmetric=True, ch_axis=-1, group_size=group_size, is_dynamic=False).to_quantization_spec())


def int8_wo_per_channel() -> QLayerConfig:
    """Return a configuration of INT8 weights with a scale for each output channel."""
    return QLayerConfig(weight=Int8PerChannelSpec(symmetric=True, ch_axis=0, is_dynamic=False).to_quantization_spec())


int2_wo_32, int2_wo_64 = (partial(int2_weight_only, size) for size in (32, 64))
int3_wo_64, int3_wo_128 = (partial(int3_weight_only, size) for size in (64, 128))
int8_wo_32 = partial(int8_weight_only, 32)
int4_wo_32, int4_wo_64, int4_wo_128 = (partial(int4_weight_only, size) for size in (32, 64, 128))
uint4_wo_32, uint4_wo_64, uint4_wo_128 = (partial(uint4_weight_only, size) for size in (32, 64, 128))


def int4_wo_per_channel() -> QLayerConfig:
    """Return a configuration of INT4 weights with a scale for each output channel."""
    return QLayerConfig(weight=Int4PerChannelSpec(ch_axis=0, is_dynamic=False).to_quantization_spec())


def int4_weight_and_activation(group_size: int) -> QLayerConfig:
    """Return a configuration of symmetric INT4 weights and dynamic INT4 activations, both in groups."""
    activation = Int4PerGroupSpec(ch_axis=-1, group_size=group_size, is_dynamic=True).to_quantization_spec()
    return QLayerConfig(weight=int4_weight_only(group_size).weight, input_tensors=activation)


int4_wa_64 = partial(int4_weight_and_activation, 64)


def uint4_wo_per_channel() -> QLayerConfig:
    """Return a configuration of UINT4 weights with a scale and a zero point for each output channel."""
    return QLayerConfig(weight=Uint4PerChannelSpec(ch_axis=0, is_dynamic=False).to_quantization_spec())


def _both(helper: SingleLevelSpec) -> QLayerConfig:
    """Return a configuration in which weights and activations have the same spec."""
    spec = helper.to_quantization_spec()
    return QLayerConfig(weight=spec, input_tensors=spec)


def int8() -> QLayerConfig:
    """Return a configuration of symmetric INT8 weights and static INT8 activations.

    Each tensor has one scale.
    """
    return _both(Int8PerTensorSpec(is_dynamic=False))


def fp8() -> QLayerConfig:
    """Return a configuration of E4M3 weights and static E4M3 activations, with one scale per tensor."""
    return _both(FP8E4M3PerTensorSpec(scale_type="float", is_dynamic=False))


fp8_per_head = fp8


def fp8_outputs() -> QTensorConfig:
    """Return a configuration for a KV cache or attention: E4M3 with one static scale."""
    return FP8E4M3PerTensorSpec(is_dynamic=False).to_quantization_spec()


def fp8_per_head_cache() -> QTensorConfig:
    """Return a configuration of an E4M3 cache with a static scale for each head."""
    return FP8E4M3PerChannelSpec(ch_axis=1, is_dynamic=False).to_quantization_spec()


def int8_per_token_head_cache() -> QTensorConfig:
    """Return a configuration of a symmetric INT8 cache with a dynamic scale for each token and head."""
    return Int8PerChannelSpec(ch_axis=1, is_dynamic=True, symmetric=True).to_quantization_spec()


def nvfp4_cache() -> TensorSpec:
    """Return a configuration of an NVFP4 cache.

    The scales of blocks are dynamic, and one static scale multiplies them.
    """
    spec = nvfp4().input_tensors
    assert spec is not None
    return spec


def ptpc_fp8() -> QLayerConfig:
    """Return a configuration of E4M3 weights and dynamic E4M3 activations.

    Weights have a scale for each output channel, and activations have a scale for each token.
    """
    weight = FP8E4M3PerChannelSpec(ch_axis=0, is_dynamic=False).to_quantization_spec()
    return QLayerConfig(weight=weight, input_tensors=FP8E4M3PerChannelSpec(ch_axis=1, is_dynamic=True).to_quantization_spec())


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
    """Return a configuration of MXFP6 weights and dynamic MXFP6 activations, both with E3M2 elements."""
    return QLayerConfig(weight=_weight(OCP_MXFP6E3M2Spec), input_tensors=_activation(OCP_MXFP6E3M2Spec))


def mxfp6_e2m3() -> QLayerConfig:
    """Return a configuration of MXFP6 weights and dynamic MXFP6 activations, both with E2M3 elements."""
    return QLayerConfig(weight=_weight(OCP_MXFP6E2M3Spec), input_tensors=_activation(OCP_MXFP6E2M3Spec))


def mxfp4_mxfp6_e2m3() -> QLayerConfig:
    """Return a configuration of MXFP4 weights and dynamic MXFP6 activations with E2M3 elements."""
    return QLayerConfig(weight=_weight(OCP_MXFP4Spec), input_tensors=_activation(OCP_MXFP6E2M3Spec))


def mxfp4_fp8() -> QLayerConfig:
    """Return a configuration of MXFP4 weights, and of static E4M3 activations with one scale per tensor."""
    return QLayerConfig(weight=_weight(OCP_MXFP4Spec), input_tensors=FP8E4M3PerTensorSpec(is_dynamic=False).to_quantization_spec())


def _fp4_under(scales: SingleLevelSpec, group_size: int) -> QLayerConfig:
    """Return a configuration of FP4 weights and activations in groups. ``scales`` quantizes their scales.

    Each tensor also has one static scale, which multiplies the group scales. The group scales of activations
    are dynamic.
    """
    weight, activation = (
        ScaleQuantSpec(FP4PerGroupSpec(ch_axis=-1, group_size=group_size, is_dynamic=dynamic, scale_type="float32"), scales)
        for dynamic in (False, True)
    )
    return QLayerConfig(weight=weight.to_quantization_spec(), input_tensors=activation.to_quantization_spec())


def nvfp4() -> QLayerConfig:
    """Return a configuration of FP4 in groups of 16 with E4M3 scales.

    One more scale per tensor multiplies the E4M3 scales.
    """
    return _fp4_under(FP8E4M3PerTensorSpec(scale_type="float32", is_dynamic=False), 16)


def amdfp4_with_global_scale(group_size: int) -> QLayerConfig:
    """Return a configuration of FP4 in groups with E5M3 scales. One more scale per tensor multiplies them.

    Groups have 16 or 32 elements.
    """
    return _fp4_under(FP8E5M3PerTensorSpec(scale_type="float32", is_dynamic=False), group_size)


amdfp4_global16, amdfp4_global32 = (partial(amdfp4_with_global_scale, size) for size in (16, 32))


def amdfp4_in_groups(group_size: int = 16) -> QLayerConfig:
    """Return a configuration of FP4 weights and dynamic FP4 activations, both in groups with E5M3 scales.

    Groups have 16 or 32 elements.
    """
    weight, activation = (AmdFP4Spec(ch_axis=-1, group_size=group_size, is_dynamic=dynamic) for dynamic in (False, True))
    return QLayerConfig(weight=weight.to_quantization_spec(), input_tensors=activation.to_quantization_spec())


amdfp4, amdfp4_g32 = (partial(amdfp4_in_groups, size) for size in (16, 32))


def int4_fp8() -> QLayerConfig:
    """Return a configuration of weights that are rounded first to E4M3, then to INT4.

    E4M3 has one scale per tensor, and INT4 has a scale per channel. Activations are dynamic E4M3.
    """
    first = FP8E4M3PerTensorSpec(scale_type="float32", is_dynamic=False)
    weight = ProgressiveSpec(first, Int4PerChannelSpec(ch_axis=0, scale_type="float32", is_dynamic=False))
    activation = FP8E4M3PerTensorSpec(scale_type="float32", is_dynamic=True)
    return QLayerConfig(weight=weight.to_quantization_spec(), input_tensors=activation.to_quantization_spec())


def bfp16() -> QLayerConfig:
    """Return a configuration of BFP16 weights and activations. Eight values share an exponent."""
    return _both(BFP16Spec(ch_axis=-1))


def mx6(block_size: int = 16) -> QLayerConfig:
    """Return a configuration of MX6 weights and activations.

    Args:
        block_size: Number of values that share an exponent. The definition of the format says 16. Before AMD
            Quark 0.13, the default was 32.
    """
    return _both(MX6Spec(ch_axis=-1, block_size=block_size))


def mx9(block_size: int = 16) -> QLayerConfig:
    """Return a configuration of MX9 weights and activations.

    Args:
        block_size: Number of values that share an exponent, as for `mx6`.
    """
    return _both(MX9Spec(ch_axis=-1, block_size=block_size))


CONFIGURATIONS: Mapping[str, Callable[..., QLayerConfig]] = MappingProxyType(
    {
        "AmdFP4GlobalScaleScheme": amdfp4_with_global_scale,
        "AmdFP4Scheme": amdfp4_in_groups,
        "BFP16Scheme": bfp16,
        "FP4Block16ScaleE4M3Scheme": nvfp4,
        "FP8Scheme": fp8,
        "INT4_FP8Scheme": int4_fp8,
        "Int2WeightOnlyScheme": int2_weight_only,
        "Int3WeightOnlyScheme": int3_weight_only,
        "Int4WeightAndActivationScheme": int4_weight_and_activation,
        "Int4WeightOnlyPerChannelScheme": int4_wo_per_channel,
        "Int4WeightOnlyScheme": int4_weight_only,
        "Int8Scheme": int8,
        "Int8WeightOnlyPerChannelScheme": int8_wo_per_channel,
        "Int8WeightOnlyScheme": int8_weight_only,
        "MX6Scheme": mx6,
        "MX9Scheme": mx9,
        "MXFP4Scheme": mxfp4,
        "MXFP4WeightOnlyScheme": mxfp4_weight_only,
        "MXFP4_FP8Scheme": mxfp4_fp8,
        "MXFP4_MXFP6E2M3Scheme": mxfp4_mxfp6_e2m3,
        "MXFP6E2M3Scheme": mxfp6_e2m3,
        "MXFP6E3M2Scheme": mxfp6_e3m2,
        "PTPCFP8Scheme": ptpc_fp8,
        "Uint4WeightOnlyPerChannelScheme": uint4_wo_per_channel,
        "Uint4WeightOnlyScheme": uint4_weight_only,
    }
)
"""Name of a class → function that builds its configuration. The class has the same arguments."""

__all__ = ["CONFIGURATIONS"]
__all__ += list(CONFIGURATIONS)


class _Scheme(QuantizationScheme):
    """Base class of the scheme classes.

    The arguments become attributes. Each access to ``config`` builds a new configuration.
    """

    _build: ClassVar[Callable[..., QLayerConfig]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        arguments = inspect.signature(self._build).bind(*args, **kwargs)
        arguments.apply_defaults()
        vars(self).update(arguments.arguments)

    @property
    def config(self) -> QLayerConfig:
        return self._build(**vars(self)).copied()


def _scheme(name: str, build: Callable[..., QLayerConfig]) -> type[_Scheme]:
    """Return a new scheme class called ``name``.

    The class has the same docstring and arguments as ``build``, a callable that builds the configuration.
    """
    members = {"_build": staticmethod(build), "__signature__": inspect.signature(build)}
    return type(name, (_Scheme,), {**members, "__doc__": build.__doc__, "__module__": __name__})


globals().update({name: _scheme(name, build) for name, build in CONFIGURATIONS.items()})

if TYPE_CHECKING:

    def __getattr__(name: str) -> type[_Scheme]: ...  # type checkers do not see the classes that are built from the table
