"""The scheme classes of AMD Quark's public API: schemes as objects with a ``config``. No torch here."""

from __future__ import annotations

from collections.abc import Callable

from quark.config.layer import QLayerConfig
from quark.templates import QuantizationScheme
from quark_schemes.schemes import block_float, float8, integer, microscaling, two_level

__all__ = [
    "AmdFP4GlobalScaleScheme",
    "AmdFP4Scheme",
    "BFP16Scheme",
    "FP4Block16ScaleE4M3Scheme",
    "FP8Scheme",
    "INT4_FP8Scheme",
    "Int4WeightAndActivationScheme",
    "Int4WeightOnlyPerChannelScheme",
    "Int4WeightOnlyScheme",
    "Int8Scheme",
    "MX6Scheme",
    "MX9Scheme",
    "MXFP4Scheme",
    "MXFP4WeightOnlyScheme",
    "MXFP4_FP8Scheme",
    "MXFP4_MXFP6E2M3Scheme",
    "MXFP6E2M3Scheme",
    "MXFP6E3M2Scheme",
    "PTPCFP8Scheme",
    "Uint4WeightOnlyPerChannelScheme",
    "Uint4WeightOnlyScheme",
]


class _Scheme(QuantizationScheme):
    """Base of the schemes; ``config`` builds a new configuration at each access."""

    def __init__(self, build: Callable[[], QLayerConfig]) -> None:
        self._build = build

    @property
    def config(self) -> QLayerConfig:
        return self._build().copied()


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
        super().__init__(microscaling.mxfp4)


class MXFP4WeightOnlyScheme(_Scheme):
    """MXFP4 weights."""

    def __init__(self) -> None:
        super().__init__(microscaling.mxfp4_weight_only)


class MXFP6E3M2Scheme(_Scheme):
    """OCP MXFP6 weights and activations, three bits of exponent."""

    def __init__(self) -> None:
        super().__init__(microscaling.mxfp6_e3m2)


class MXFP6E2M3Scheme(_Scheme):
    """OCP MXFP6 weights and activations, two bits of exponent."""

    def __init__(self) -> None:
        super().__init__(microscaling.mxfp6_e2m3)


class MXFP4_MXFP6E2M3Scheme(_Scheme):  # noqa: N801  AMD Quark's name
    """OCP MXFP4 weights, MXFP6 activations."""

    def __init__(self) -> None:
        super().__init__(microscaling.mxfp4_mxfp6_e2m3)


class MXFP4_FP8Scheme(_Scheme):  # noqa: N801  AMD Quark's name
    """OCP MXFP4 weights, static FP8 activations."""

    def __init__(self) -> None:
        super().__init__(microscaling.mxfp4_fp8)


class AmdFP4Scheme(_Scheme):
    """FP4 in groups of ``group_size`` (16 or 32) with E5M3 scales, weights and activations."""

    def __init__(self, group_size: int = 16) -> None:
        self.group_size = group_size
        super().__init__(lambda: two_level.amdfp4_in_groups(group_size))


class AmdFP4GlobalScaleScheme(_Scheme):
    """FP4 in groups of ``group_size`` with two-level scales: E5M3 per group and one scale per tensor; weights and activations."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        super().__init__(lambda: two_level.amdfp4_with_global_scale(group_size))


class FP4Block16ScaleE4M3Scheme(_Scheme):
    """``nvfp4``: FP4 in groups of 16 with two-level scales: E4M3 per group and one scale per tensor; weights and activations."""

    def __init__(self) -> None:
        super().__init__(two_level.nvfp4)


class INT4_FP8Scheme(_Scheme):  # noqa: N801  AMD Quark's name
    """Weights first in FP8, one scale, then in 4 bits, a scale per channel; dynamic FP8 activations."""

    def __init__(self) -> None:
        super().__init__(two_level.int4_fp8)


class MX6Scheme(_Scheme):
    """MX6: shared exponents of blocks and bits of pairs, six bits in all, weights and activations."""

    def __init__(self, block_size: int = 16) -> None:
        self.block_size = block_size
        super().__init__(lambda: block_float.mx6(block_size))


class MX9Scheme(_Scheme):
    """MX9: shared exponents of blocks and bits of pairs, nine bits in all, weights and activations."""

    def __init__(self, block_size: int = 16) -> None:
        self.block_size = block_size
        super().__init__(lambda: block_float.mx9(block_size))


class BFP16Scheme(_Scheme):
    """BFP16: one exponent for eight values, weights and activations."""

    def __init__(self) -> None:
        super().__init__(block_float.bfp16)
