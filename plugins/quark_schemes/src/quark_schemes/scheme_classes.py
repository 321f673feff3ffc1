"""The documented scheme classes: schemes as objects with a ``config``. No torch here."""

from __future__ import annotations

from collections.abc import Callable

from quark.specs.layer import QLayerConfig
from quark.templates import QuantizationScheme
from quark_schemes.schemes import float8, integer, mxfp4
from quark_schemes.specs import (
    AmdFP4Spec,
    BFP16Spec,
    FP4PerGroupSpec,
    FP8E4M3PerTensorSpec,
    FP8E5M3PerTensorSpec,
    Int4PerChannelSpec,
    MX6Spec,
    OCP_MXFP4Spec,
    OCP_MXFP6E2M3Spec,
    OCP_MXFP6E3M2Spec,
    ProgressiveSpec,
    ScaleQuantSpec,
)
from quark_schemes.specs.options import DataTypeSpec, OneStageSpec


class _Scheme(QuantizationScheme):
    """A scheme whose configuration is built anew each time it is asked for."""

    def __init__(self, build: Callable[[], QLayerConfig]) -> None:
        self._build = build

    @property
    def config(self) -> QLayerConfig:
        return self._build()


class Int4WeightOnlyScheme(_Scheme):
    """Symmetric INT4 weights in groups of ``group_size``."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        super().__init__(lambda: integer.int4_weight_only(group_size))


class Int4WeightAndActivationScheme(_Scheme):
    """Symmetric INT4 weights and dynamic INT4 activations in groups of ``group_size``."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        super().__init__(lambda: integer.int4_weight_and_activation(group_size))


class Uint4WeightOnlyScheme(_Scheme):
    """Asymmetric UINT4 weights in groups of ``group_size``."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        super().__init__(lambda: integer.uint4_weight_only(group_size))


class Int4WeightOnlyPerChannelScheme(_Scheme):
    """Symmetric INT4 weights, a scale for each output channel."""

    def __init__(self) -> None:
        super().__init__(integer.int4_wo_per_channel)


class Uint4WeightOnlyPerChannelScheme(_Scheme):
    """Asymmetric UINT4 weights, a scale and a zero point for each output channel."""

    def __init__(self) -> None:
        super().__init__(integer.uint4_wo_per_channel)


class Int8Scheme(_Scheme):
    """INT8 weights and static activations."""

    def __init__(self) -> None:
        super().__init__(integer.int8)


class FP8Scheme(_Scheme):
    """FP8 E4M3 weights and static activations."""

    def __init__(self) -> None:
        super().__init__(float8.fp8)


class PTPCFP8Scheme(_Scheme):
    """FP8 weights per channel, dynamic activations per token."""

    def __init__(self) -> None:
        super().__init__(float8.ptpc_fp8)


class MXFP4Scheme(_Scheme):
    """MXFP4 weights and dynamic activations."""

    def __init__(self) -> None:
        super().__init__(mxfp4.mxfp4)


class MXFP4WeightOnlyScheme(_Scheme):
    """MXFP4 weights."""

    def __init__(self) -> None:
        super().__init__(mxfp4.mxfp4_weight_only)


# The classes below describe schemes whose names this version does not register.


def _weight_and_input(weight: DataTypeSpec, inputs: DataTypeSpec) -> QLayerConfig:
    return QLayerConfig(weight=weight.to_quantization_spec(), input_tensors=inputs.to_quantization_spec())


def _scaled_twice(group_size: int, second: OneStageSpec, dynamic: bool) -> ScaleQuantSpec:
    """FP4 groups whose scales are themselves in the format of ``second``."""
    first = FP4PerGroupSpec(ch_axis=-1, group_size=group_size, is_dynamic=dynamic, scale_type="float32")
    return ScaleQuantSpec(first_stage=first, second_stage=second)


class MXFP6E3M2Scheme(QuantizationScheme):
    """``mxfp6_e3m2``: OCP MXFP6 weights and inputs, 3 bits of exponent."""

    def __init__(self) -> None:
        super().__init__(_weight_and_input(OCP_MXFP6E3M2Spec(ch_axis=-1, is_dynamic=False), OCP_MXFP6E3M2Spec(ch_axis=-1)))


class MXFP6E2M3Scheme(QuantizationScheme):
    """``mxfp6_e2m3``: OCP MXFP6 weights and inputs, 2 bits of exponent."""

    def __init__(self) -> None:
        super().__init__(_weight_and_input(OCP_MXFP6E2M3Spec(ch_axis=-1, is_dynamic=False), OCP_MXFP6E2M3Spec(ch_axis=-1)))


class MXFP4_MXFP6E2M3Scheme(QuantizationScheme):  # noqa: N801  the documented name
    """``mxfp4_mxfp6_e2m3``: OCP MXFP4 weights, MXFP6 inputs."""

    def __init__(self) -> None:
        super().__init__(_weight_and_input(OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False), OCP_MXFP6E2M3Spec(ch_axis=-1)))


class MXFP4_FP8Scheme(QuantizationScheme):  # noqa: N801  the documented name
    """``mxfp4_fp8``: OCP MXFP4 weights, static FP8 inputs."""

    def __init__(self) -> None:
        super().__init__(_weight_and_input(OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False), FP8E4M3PerTensorSpec()))


class AmdFP4Scheme(QuantizationScheme):
    """``amdfp4``, ``amdfp4_g32``: FP4 in groups of 16 or 32 with E5M3 scales, weights and inputs."""

    def __init__(self, group_size: int = 16) -> None:
        self.group_size = group_size
        weight = AmdFP4Spec(ch_axis=-1, group_size=group_size, is_dynamic=False)
        super().__init__(_weight_and_input(weight, AmdFP4Spec(ch_axis=-1, group_size=group_size, is_dynamic=True)))


class AmdFP4GlobalScaleScheme(QuantizationScheme):
    """``amdfp4_global16``, ``amdfp4_global32``: the same with one more scale over all groups' scales."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        second = FP8E5M3PerTensorSpec(scale_type="float32")
        super().__init__(_weight_and_input(_scaled_twice(group_size, second, False), _scaled_twice(group_size, second, True)))


class FP4Block16ScaleE4M3Scheme(QuantizationScheme):
    """``nvfp4``: FP4 in groups of 16 with E4M3 scales and one more scale over all of those, weights and inputs."""

    def __init__(self) -> None:
        second = FP8E4M3PerTensorSpec(scale_type="float32")
        super().__init__(_weight_and_input(_scaled_twice(16, second, False), _scaled_twice(16, second, True)))


class MX6Scheme(QuantizationScheme):
    """``mx6``: shared exponents of blocks and sub-blocks, weights and inputs."""

    def __init__(self) -> None:
        both = MX6Spec(ch_axis=-1, block_size=32)
        super().__init__(_weight_and_input(both, both))


class BFP16Scheme(QuantizationScheme):
    """``bfp16``: one exponent for eight values, weights and inputs."""

    def __init__(self) -> None:
        both = BFP16Spec(ch_axis=-1)
        super().__init__(_weight_and_input(both, both))


class INT4_FP8Scheme(QuantizationScheme):  # noqa: N801  the documented name
    """``int4_fp8``: weights first in FP8, one scale, then in 4 bits, a scale per channel; FP8 inputs, ranges found as they come."""

    def __init__(self) -> None:
        first, second = FP8E4M3PerTensorSpec(scale_type="float32"), Int4PerChannelSpec(ch_axis=0, scale_type="float32")
        weight = ProgressiveSpec(first_stage=first, second_stage=second)
        super().__init__(_weight_and_input(weight, FP8E4M3PerTensorSpec(scale_type="float32", is_dynamic=True)))
