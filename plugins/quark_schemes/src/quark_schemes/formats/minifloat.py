"""Small floating-point numbers: sign, exponent, mantissa, no infinities. One class serves FP8, FP6 and FP4.

Rounding adds and takes away a power of two so large that only the wanted bits of a value survive the sum: the processor then rounds half
to even by itself. Encoding multiplies by a power of two that puts the format's exponents, subnormal numbers included, where float32 has
its own, so that a shift gives the code. No tables, no searches.

Source: OCP 8-bit Floating Point Specification v1.0; OCP Microscaling Formats v1.0; spec of the documented surface, §2.2–2.4.
"""

from __future__ import annotations

import math

import attrs
import torch
from torch import Tensor

from quark.numerics import Granularity, NumberFormat, QParams
from quark.specs.enums import QSchemeType, RoundType
from quark.specs.tensor import QTensorConfig
from quark_schemes import packing
from quark_schemes.formats.scales import SMALLEST_SCALE, decode_e8m0, encode_e8m0, in_scale_type, shared_exponent_scale

_FLOAT32_BIAS = 127
_FLOAT32_MANTISSA = 23
_EXPONENT = 0x7F800000


@attrs.frozen(kw_only=True)
class MiniFloat(NumberFormat):
    """A floating-point number of few bits.

    Attributes:
        exponent_bits, mantissa_bits, bias: Of the format.
        largest: Largest finite value, to which larger ones saturate.
        keeps_signed_zero: Whether −0, and small negative values that round to it, stay −0.
        torch_dtype: Torch's own dtype of these codes, in which checkpoints store them; None where they are packed into bytes.
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float
    keeps_signed_zero: bool
    torch_dtype: torch.dtype | None = None
    default_observer: str = "PerTensorMinMaxObserver"

    @property
    def storage_dtype(self) -> torch.dtype:  # type: ignore[override]
        """Codes are bytes, or torch's own 8-bit floats."""
        return self.torch_dtype or torch.uint8

    @property
    def largest_exponent(self) -> int:
        """Exponent of the largest value."""
        return math.frexp(self.largest)[1] - 1

    def spec_problem(self, spec: QTensorConfig) -> str | None:
        missing = [name for name in ("is_dynamic", "qscheme") if getattr(spec, name) is None]
        if missing:
            return f"{self.name} needs {' and '.join(missing)}: set them, or use a *Spec helper"
        if spec.symmetric is False:
            return f"{self.name} has no zero point: set symmetric=True or None"
        if spec.round_method not in (None, RoundType.half_even):
            return f"{self.name} rounds half to even: round_method={spec.round_method.name} is not carried out by this version"
        if spec.scale_format not in (None, "float32", "e8m0"):
            return f"scales of format {spec.scale_format} are not carried out by this version: use float32 or e8m0"
        if spec.scale_format == "e8m0" and spec.qscheme is not QSchemeType.per_group:
            return "e8m0 scales are shared by groups: set qscheme=per_group"
        return None

    def by_reciprocal(self, spec: QTensorConfig) -> bool:
        return spec.scale_format == "e8m0"

    def qparams(self, low: Tensor, high: Tensor, spec: QTensorConfig) -> QParams:
        amax = torch.maximum(-low, high)
        if spec.scale_format == "e8m0":
            mode = spec.scale_calculation_mode or "even"
            return QParams(shared_exponent_scale(amax, mode, self.mantissa_bits, self.largest_exponent))
        return QParams(in_scale_type(torch.where(amax == 0, SMALLEST_SCALE, amax / self.largest), spec))

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        t.clamp_(-self.largest, self.largest)
        smallest = 1 - self.bias
        # The exponent of each value, not below that of the smallest normal number: subnormal numbers share its spacing.
        exponent = t.view(torch.int32).bitwise_and(_EXPONENT).clamp_(min=(smallest + _FLOAT32_BIAS) << _FLOAT32_MANTISSA)
        # 1.5 · 2^(exponent + 23 − mantissa bits): adding it leaves exactly the wanted mantissa bits.
        magic = exponent.add_(((_FLOAT32_MANTISSA - self.mantissa_bits) << _FLOAT32_MANTISSA) | (1 << (_FLOAT32_MANTISSA - 1)))
        offset = magic.view(torch.float32)
        if not self.keeps_signed_zero:
            return t.add_(offset).sub_(offset)
        rounded = torch.add(t, offset).sub_(offset)
        return torch.copysign(rounded, t, out=t)

    def encode(self, t: Tensor) -> Tensor:
        return self._encode(t * self._to_our_exponents)

    def codes(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        if self.torch_dtype is not None:
            # Torch's cast rounds to the same values, and is the faster of the two in this direction alone.
            return t.clamp_(-self.largest, self.largest).to(self.torch_dtype)
        return self._encode(self.round_(t, zero).mul_(self._to_our_exponents))

    @property
    def _to_our_exponents(self) -> float:
        """Factor that puts this format's exponents where float32 has its own."""
        return 2.0 ** (self.bias - _FLOAT32_BIAS)

    def _encode(self, scaled: Tensor) -> Tensor:
        # The arithmetic shift leaves exponent and mantissa at the bottom, and copies of the sign above them.
        bits = scaled.view(torch.int32).bitwise_right_shift_(_FLOAT32_MANTISSA - self.mantissa_bits)
        sign_bit = 1 << (self.bits - 1)
        magnitude = bits.bitwise_and(sign_bit - 1)
        codes = magnitude.bitwise_or_(bits.bitwise_right_shift_(31).bitwise_and_(sign_bit)).to(torch.uint8)
        return codes if self.torch_dtype is None else codes.view(self.torch_dtype)

    def decode(self, codes: Tensor) -> Tensor:
        bits = codes.view(torch.uint8).to(torch.int32)
        sign_bit = 1 << (self.bits - 1)
        magnitude = bits.bitwise_and(sign_bit - 1).bitwise_left_shift_(_FLOAT32_MANTISSA - self.mantissa_bits)
        sign = bits.bitwise_and_(sign_bit).bitwise_left_shift_(32 - self.bits)
        return magnitude.bitwise_or_(sign).view(torch.float32).mul_(2.0 ** (_FLOAT32_BIAS - self.bias))

    def pack(self, codes: Tensor, granularity: Granularity, order: str) -> Tensor:
        if self.bits == 4:
            return packing.pack_two(codes)
        return packing.pack_six(codes) if self.bits == 6 else codes

    def unpack(self, packed: Tensor, granularity: Granularity, order: str, shape: tuple[int, ...]) -> Tensor:
        if self.bits == 4:
            return packing.unpack_two(packed)
        return packing.unpack_six(packed) if self.bits == 6 else packed

    def pack_qparams(self, qparams: QParams, spec: QTensorConfig, granularity: Granularity, order: str) -> dict[str, Tensor]:
        return {"scale": encode_e8m0(qparams.scale) if spec.scale_format == "e8m0" else qparams.scale}

    def unpack_qparams(
        self, tensors: dict[str, Tensor], spec: QTensorConfig, granularity: Granularity, order: str, shape: tuple[int, ...]
    ) -> QParams:
        scale = tensors["scale"]
        return QParams(decode_e8m0(scale) if spec.scale_format == "e8m0" else scale)


FP8_E4M3 = MiniFloat(
    name="fp8_e4m3",
    bits=8,
    exponent_bits=4,
    mantissa_bits=3,
    bias=7,
    largest=448.0,
    keeps_signed_zero=True,
    torch_dtype=torch.float8_e4m3fn,
)
FP8_E5M2 = MiniFloat(
    name="fp8_e5m2",
    bits=8,
    exponent_bits=5,
    mantissa_bits=2,
    bias=15,
    largest=57344.0,
    keeps_signed_zero=True,
    torch_dtype=torch.float8_e5m2,
)
FP6_E3M2 = MiniFloat(name="fp6_e3m2", bits=6, exponent_bits=3, mantissa_bits=2, bias=3, largest=28.0, keeps_signed_zero=False)
FP6_E2M3 = MiniFloat(name="fp6_e2m3", bits=6, exponent_bits=2, mantissa_bits=3, bias=1, largest=7.5, keeps_signed_zero=False)
FP4 = MiniFloat(name="fp4", bits=4, exponent_bits=2, mantissa_bits=1, bias=1, largest=6.0, keeps_signed_zero=False)
