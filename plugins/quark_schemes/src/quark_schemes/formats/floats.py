"""The floating-point formats FP8, FP6, FP4 and E8M0, casts to 16-bit floats, and the packing of codes.

`MiniFloat` implements FP8, FP6 and FP4 with the arithmetic in `arithmetic.small_float`. E8M0 is a format for
scales. An E8M0 byte stores the exponent of a power of two from 2^-127 to 2^127. Source: OCP Microscaling
Formats v1.0, §5.4.1.

A checkpoint stores two FP4 codes in a byte, four FP6 codes in three bytes, and FP8 codes unchanged. It stores
scales in the scale format of the spec.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from quark.base.scalars import divided
from quark.config.enums import QSchemeType
from quark.config.layer import TensorSpec
from quark.config.tensor import QTensorConfig
from quark.numbers import Granularity, NumberFormat, Packing, PerPaddedGroup, QParams, Spacing
from quark.numbers.kernels import DeviceCode
from quark_schemes.arithmetic.packing import pack_bits, unpack_bits
from quark_schemes.arithmetic.shared_exponent import MODES, decode_e8m0, encode_e8m0, shared_exponent_scale
from quark_schemes.arithmetic.small_float import E2M1, E2M3, E3M2, E4M3, E5M2, E5M3, FloatShape, decode_small, encode_small, round_small_
from quark_schemes.scale_formats import SMALLEST_SCALE, scale_error, scale_format_of, with_outer_scale

__all__ = [
    "BFLOAT16",
    "FLOAT16",
    "FP4",
    "FP6_E2M3",
    "FP6_E3M2",
    "FP8_E4M3",
    "FP8_E5M2",
    "FP8_E5M3",
    "FP8_E8M0",
    "CastFormat",
    "MiniFloat",
    "PowerOfTwo",
    "SmallFloatPacking",
]


@attrs.frozen
class SmallFloatPacking(Packing):
    """Packs codes of ``bits`` bits along the last axis. Scales are stored in the scale format of the spec."""

    bits: int

    def pack(self, codes: Tensor, granularity: Granularity, order: str) -> Tensor:
        return codes if self.bits == 8 else pack_bits(codes, self.bits)

    def unpack(self, packed: Tensor, granularity: Granularity, order: str, shape: tuple[int, ...]) -> Tensor:
        return packed if self.bits == 8 else unpack_bits(packed, self.bits, shape[-1], signed=False)

    def pack_qparams(self, qparams: QParams, spec: QTensorConfig, granularity: Granularity, order: str) -> dict[str, Tensor]:
        return {"scale": scale_format_of(spec).encode(qparams.scale)}

    def unpack_qparams(
        self, tensors: dict[str, Tensor], spec: QTensorConfig, granularity: Granularity, order: str, shape: tuple[int, ...]
    ) -> QParams:
        return QParams(scale_format_of(spec).decode(tensors["scale"]))


_SMALLEST_QUOTIENT = float(torch.finfo(torch.float32).tiny)


@attrs.frozen(kw_only=True)
class MiniFloat(NumberFormat):
    """A floating-point number of few bits.

    Attributes:
        shape: The layout of the format, with exponent, mantissa and special codes.
        torch_dtype: The torch dtype with these codes, which checkpoints also use; None for formats whose
            codes are packed into bytes.
    """

    name: str
    shape: FloatShape
    torch_dtype: torch.dtype | None = None
    packing: Packing = attrs.field(default=attrs.Factory(lambda self: SmallFloatPacking(self.shape.bits), takes_self=True))

    @property
    def bits(self) -> int:  # type: ignore[override]
        """The number of bits in a code."""
        return self.shape.bits

    @property
    def storage_dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype of unpacked codes: an 8-bit float dtype of torch, or uint8."""
        return self.torch_dtype or torch.uint8

    def canonicalize(self, spec: QTensorConfig) -> TensorSpec:
        # These formats have no zero point, even if a configuration leaves ``symmetric`` open.
        return with_outer_scale(spec if spec.symmetric is not None else attrs.evolve(spec, symmetric=True))

    def spec_error(self, spec: QTensorConfig) -> str | None:
        missing = [name for name in ("is_dynamic", "qscheme") if getattr(spec, name) is None]
        if missing:
            return f"{self.name} needs {' and '.join(missing)}: set them, or use a *Spec helper"
        if spec.symmetric is False:
            return f"{self.name} has no zero point: set symmetric=True or None"
        if not self.shape.signed and not spec.is_scale_quant:
            return f"{self.name} has no sign and holds only scales: set is_scale_quant, or use another format for weights and activations"
        if spec.scale_format == "e8m0" and spec.qscheme not in (QSchemeType.per_group, QSchemeType.per_block):
            return "e8m0 scales are shared by groups or blocks: set qscheme=per_group"
        if spec.scale_calculation_mode not in (None, *MODES):
            return f"scale_calculation_mode={spec.scale_calculation_mode!r} is unknown: use one of {', '.join(MODES)}"
        return scale_error(spec)

    def granularity(self, spec: QTensorConfig, *, activation: bool) -> Granularity:
        found = super().granularity(spec, activation=activation)
        return PerPaddedGroup.of(found) if spec.scale_format == "e8m0" else found  # blocks of OCP MX are padded

    def by_reciprocal(self, spec: QTensorConfig) -> bool:
        return spec.scale_format == "e8m0"

    def device_code(self, spec: QTensorConfig) -> DeviceCode | None:
        from quark_schemes.kernels.floats import device_code

        mode = (spec.scale_calculation_mode or "even") if spec.scale_format == "e8m0" else None
        return device_code(self.shape, mode, scale_format_of(spec).rounding)

    def max_magnitude(self, spec: QTensorConfig) -> float:
        return self.shape.largest

    def spacing(self, spec: QTensorConfig) -> Spacing:
        return Spacing(self.shape.smallest, self.shape.largest, 2 << self.shape.mantissa_bits)

    def qparams(self, low: Tensor, high: Tensor, spec: QTensorConfig) -> QParams:
        amax = torch.maximum(-low, high)
        if spec.scale_format == "e8m0":
            mode, shape = spec.scale_calculation_mode or "even", self.shape
            return QParams(shared_exponent_scale(amax, mode, shape.mantissa_bits, shape.largest_exponent, shape.largest))
        # The quotient of a subnormal magnitude may be 0, but a scale must be positive.
        ideal = torch.where(amax == 0, SMALLEST_SCALE, divided(amax, self.shape.largest).clamp_(min=_SMALLEST_QUOTIENT))
        return QParams(scale_format_of(spec).round(ideal))

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return round_small_(t, self.shape)

    def encode(self, t: Tensor) -> Tensor:
        # For encoding, torch's cast is faster than a table; for decoding, a table is faster.
        return t.to(self.torch_dtype) if self.torch_dtype is not None else encode_small(t, self.shape)

    def codes(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        if self.torch_dtype is None:
            return encode_small(t, self.shape, is_rounded=False)
        return t.clamp_(-self.shape.largest, self.shape.largest).to(self.torch_dtype)

    def write_codes(self, t: Tensor, zero: Tensor | None, out: Tensor) -> None:
        if self.torch_dtype is not None:
            out.copy_(t.clamp_(-self.shape.largest, self.shape.largest))
        elif out.is_contiguous():
            encode_small(t, self.shape, is_rounded=False, out=out)
        else:
            out.copy_(self.codes(t, zero))

    def writes_codes_of(self, dtype: torch.dtype) -> bool:
        return dtype is torch.float32 or (dtype is torch.bfloat16 and self.torch_dtype is None)

    def decode(self, codes: Tensor) -> Tensor:
        return decode_small(codes.view(torch.uint8), self.shape)


FP8_E4M3 = MiniFloat(name="fp8_e4m3", shape=E4M3, torch_dtype=torch.float8_e4m3fn)
FP8_E5M2 = MiniFloat(name="fp8_e5m2", shape=E5M2, torch_dtype=torch.float8_e5m2)
FP8_E5M3 = MiniFloat(name="fp8_e5m3", shape=E5M3)
FP6_E3M2 = MiniFloat(name="fp6_e3m2", shape=E3M2)
FP6_E2M3 = MiniFloat(name="fp6_e2m3", shape=E2M3)
FP4 = MiniFloat(name="fp4", shape=E2M1)


@attrs.frozen(kw_only=True)
class PowerOfTwo(NumberFormat):
    """A format of positive powers of two.

    Values are rounded up, so that scales in this format are large enough and no element saturates. 0 becomes
    float32's smallest normal number.
    """

    name: str
    bits: int = 8
    storage_dtype: torch.dtype = torch.uint8

    def spec_error(self, spec: QTensorConfig) -> str | None:
        if not spec.is_scale_quant:
            return f"{self.name} holds only scales: use it as scale_format='e8m0', or as the second level of a ScaleQuantSpec"
        return None

    def max_magnitude(self, spec: QTensorConfig) -> float:
        return 1.0

    def qparams(self, low: Tensor, high: Tensor, spec: QTensorConfig) -> QParams:
        amax = torch.maximum(-low, high).float()
        return QParams(torch.where(amax == 0, 1.0, amax))

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return t.copy_(shared_exponent_scale(t.clamp_(0.0, 2.0**127), "ceil", 0, 0))

    def encode(self, t: Tensor) -> Tensor:
        return encode_e8m0(t)

    def decode(self, codes: Tensor) -> Tensor:
        return decode_e8m0(codes)


FP8_E8M0 = PowerOfTwo(name="fp8_e8m0")


@attrs.frozen(kw_only=True)
class CastFormat(NumberFormat):
    """The format float16 or bfloat16.

    The codes are numbers of this dtype. Finite values saturate at the largest number of the dtype.
    """

    name: str
    bits: int
    storage_dtype: torch.dtype
    is_cast: bool = True
    default_observer: str = "PlaceholderObserver"

    def spec_error(self, spec: QTensorConfig) -> str | None:
        return None

    def max_magnitude(self, spec: QTensorConfig) -> float:
        return torch.finfo(self.storage_dtype).max

    def qparams(self, low: Tensor, high: Tensor, spec: QTensorConfig) -> QParams:
        return QParams(torch.ones((), dtype=torch.float32, device=low.device))

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return t.copy_(self.encode(t))

    def encode(self, t: Tensor) -> Tensor:
        largest = torch.finfo(self.storage_dtype).max
        codes = t.to(self.storage_dtype)
        return codes if codes is t else torch.where(t.isinf(), codes, codes.clamp(-largest, largest))

    def decode(self, codes: Tensor) -> Tensor:
        return codes.float()


FLOAT16 = CastFormat(name="float16", bits=16, storage_dtype=torch.float16)
BFLOAT16 = CastFormat(name="bfloat16", bits=16, storage_dtype=torch.bfloat16)
