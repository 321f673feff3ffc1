"""Block floating point: whole mantissas under a power of two that a block shares. MXINT8, BFP16.

A value is ``mantissa · 2^(E − fraction bits)``; ``E`` is the exponent of the block's largest magnitude,
stored as a byte, E + 127. There are no zero points.

Source: OCP Microscaling Formats v1.0 (MXINT8); AMD Quark 0.13 (BFP16).
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from quark.config.enums import Dtype, QSchemeType, RoundType
from quark.config.layer import TensorSpec
from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError
from quark.numbers import NumberFormat, Packing, QParams, Spacing
from quark.numbers.kernels import DeviceCode
from quark_schemes.arithmetic.shared_exponent import MODES, shared_exponent_scale
from quark_schemes.arithmetic.whole_numbers import WHOLE_ROUNDINGS
from quark_schemes.packing.shared_exponents import SharedExponentPacking

__all__ = ["BFP16", "MX", "BlockFloat", "MxFormat"]

_SMALLEST = 2.0**-126
"""Smallest scale, float32's smallest normal number: its reciprocal is finite."""


@attrs.frozen(kw_only=True)
class BlockFloat(NumberFormat):
    """Mantissas in two's complement that share an exponent.

    Attributes:
        low, high: Bounds of the mantissa.
        fraction_bits: Bits of the mantissa behind the point.
        block: Default size of a block.
        grows: Whether the exponent is one higher where the largest value would round beyond ``high``;
            without, it saturates.
        modes: Accepted values of ``scale_calculation_mode``, the default first. Empty: the exponent is that
            of the largest value.
        even_bits: Mantissa bits to which mode ``"even"`` rounds the largest value.
    """

    name: str
    bits: float
    storage_dtype: torch.dtype
    low: int
    high: int
    fraction_bits: int
    block: int
    grows: bool = False
    modes: tuple[str, ...] = ()
    even_bits: int = 0
    rounding: RoundType = RoundType.half_even
    default_observer: str = "PerBlockMXObserver"
    packing: Packing = attrs.field(default=attrs.Factory(lambda self: SharedExponentPacking(self.fraction_bits), takes_self=True))

    def canonicalize(self, spec: QTensorConfig) -> TensorSpec:
        return attrs.evolve(
            spec,
            qscheme=QSchemeType.per_group,
            ch_axis=-1 if spec.ch_axis is None else spec.ch_axis,
            group_size=self.block if spec.group_size is None else spec.group_size,
            is_dynamic=spec.is_dynamic is not False,
            # Where the exponent depends on which end of the range is the largest, observers must tell the two
            # apart.
            symmetric=not self.grows,
            observer_cls=spec.observer_cls or self.default_observer,
        )

    def for_spec(self, spec: QTensorConfig) -> BlockFloat:
        return self if spec.round_method in (None, self.rounding) else attrs.evolve(self, rounding=spec.round_method)

    def spec_error(self, spec: QTensorConfig) -> str | None:
        # Formats without modes of their own accept the known ones, which AMD Quark's configurations of them
        # hold.
        if spec.scale_calculation_mode not in (None, *(self.modes or MODES)):
            return f"scale_calculation_mode={spec.scale_calculation_mode!r} is unknown: use one of {', '.join(self.modes or MODES)}"
        if spec.scale_format not in (None, "e8m0"):
            return f"{self.name} has powers of two as scales, not scale_format={spec.scale_format!r}: leave it out"
        return None

    def by_reciprocal(self, spec: QTensorConfig) -> bool:
        return True  # exact: scales are powers of two, none so small that its reciprocal overflows

    def device_code(self, spec: QTensorConfig) -> DeviceCode | None:
        if self.rounding is not RoundType.half_even:
            return None
        from quark_schemes.kernels.block_float import device_code

        return device_code(self.low, self.high, self.fraction_bits, self._mode(spec), self.even_bits, self.grows)

    def _mode(self, spec: QTensorConfig) -> str:
        return (spec.scale_calculation_mode or self.modes[0]) if self.modes else "floor"

    def max_magnitude(self, spec: QTensorConfig) -> float:
        return float(self.high)

    def spacing(self, spec: QTensorConfig) -> Spacing | None:
        return Spacing(smallest=0.5, largest=-self.low, steps=-self.low)

    def qparams(self, low: Tensor, high: Tensor, spec: QTensorConfig) -> QParams:
        amax = torch.maximum(-low, high)
        mode = self._mode(spec)
        # In units of the mantissa's last place the largest value is 2^fraction_bits, or more.
        scale = shared_exponent_scale(amax, mode, self.even_bits, 0, self.high / (1 << self.fraction_bits))
        scale = (scale * 2.0**-self.fraction_bits).clamp(min=_SMALLEST)
        if self.grows:
            scale = torch.where(WHOLE_ROUNDINGS[self.rounding](high / scale) > self.high, scale * 2, scale)
        return QParams(scale)

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return WHOLE_ROUNDINGS[self.rounding](t).clamp_(self.low, self.high)

    def encode(self, t: Tensor) -> Tensor:
        return t.to(self.storage_dtype)

    def decode(self, codes: Tensor) -> Tensor:
        return codes.float()


@attrs.frozen(kw_only=True)
class MxFormat(BlockFloat):
    """The format ``mx`` of AMD Quark's public API: ``mx_element_dtype`` names the element format; only INT8 is this class's own."""

    element: Dtype

    def canonicalize(self, spec: QTensorConfig) -> TensorSpec:
        if spec.mx_element_dtype is None:
            raise ConfigError("Dtype.mx needs mx_element_dtype: Dtype.int8, fp4, fp6_e2m3, fp6_e3m2, fp8_e4m3 or fp8_e5m2")
        canonical = super().canonicalize(spec)
        assert isinstance(canonical, QTensorConfig)
        if spec.mx_element_dtype is self.element:
            return canonical
        return attrs.evolve(canonical, dtype=spec.mx_element_dtype, mx_element_dtype=None, scale_format="e8m0")


MX = MxFormat(
    name="mx",
    bits=8,
    storage_dtype=torch.int8,
    low=-127,
    high=127,
    fraction_bits=6,
    block=32,
    modes=MODES,
    even_bits=8,
    element=Dtype.int8,
)
BFP16 = BlockFloat(name="bfp16", bits=8, storage_dtype=torch.int8, low=-128, high=127, fraction_bits=6, block=8, grows=True)
