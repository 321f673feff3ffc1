"""The documented scheme classes: schemes as objects with a ``config``. No torch here."""

from __future__ import annotations

from collections.abc import Callable

from quark.specs.layer import QLayerConfig
from quark.templates import QuantizationScheme
from quark_schemes.schemes import float8, integer, mxfp4


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
