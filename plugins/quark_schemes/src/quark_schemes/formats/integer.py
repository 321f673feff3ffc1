"""The integer formats: integers with a scale, and with a zero point if the range is asymmetric.

A checkpoint stores eight 4-bit codes in a word, and packs 2-bit and 3-bit codes into bytes. It stores the
transpose of a weight that has a scale per group. Source: AMD Quark 0.13 and its checkpoints (``int4_wo_128``,
``int8``, ``uint4_wo_128``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Self

import attrs
import torch
from torch import Tensor

from quark.base.scalars import divided
from quark.config.enums import RoundType, ScaleType, ZeroPointType
from quark.config.layer import TensorSpec
from quark.config.tensor import QTensorConfig
from quark.numbers import Granularity, NumberFormat, Packing, PerGroup, QParams, Spacing, observer_class
from quark.numbers.kernels import DeviceCode
from quark_schemes.arithmetic.packing import (
    pack_bits,
    pack_nibbles,
    pack_nibbles_across,
    unpack_bits,
    unpack_nibbles,
    unpack_nibbles_across,
)
from quark_schemes.scale_formats import (
    SMALLEST_SCALE,
    PlainScales,
    PowerOfTwoScales,
    scale_error,
    scale_format_of,
    smallest_scale,
    with_outer_scale,
)

__all__ = [
    "INT2",
    "INT3",
    "INT4",
    "INT8",
    "INT16",
    "INT32",
    "UINT2",
    "UINT4",
    "UINT8",
    "UINT16",
    "IntegerFormat",
    "IntegerPacking",
    "WholeNumbers",
]

_EXACT_BITS = 24
"""Number of bits up to which float32 represents every integer exactly."""


@attrs.frozen
class IntegerPacking(Packing):
    """Packs integers of ``bits`` bits. The integers are signed if ``signed`` is true.

    If a weight has a scale per group, the weight and the scales are stored transposed, as ``[I, O]`` and
    ``[groups, O]``. Eight 4-bit codes form an int32 word along the last axis. Unsigned 16-bit codes are
    stored as int16, because torch cannot index rows of uint16. Zero points are packed like codes.
    """

    bits: int
    signed: bool
    storage_dtype: torch.dtype

    def pack(self, codes: Tensor, granularity: Granularity, order: str) -> Tensor:
        if self.bits == 4 and isinstance(granularity, PerGroup) and codes.ndim == 2:
            return pack_nibbles_across(codes, order)
        return self._pack(_laid_out(codes, granularity).contiguous(), order)

    def unpack(self, packed: Tensor, granularity: Granularity, order: str, shape: tuple[int, ...]) -> Tensor:
        if self.bits == 4 and isinstance(granularity, PerGroup) and len(shape) == 2 and not packed.is_meta:
            return unpack_nibbles_across(packed, order, shape[0], signed=self.signed)
        stored = (shape[1], shape[0]) if isinstance(granularity, PerGroup) and len(shape) == 2 else shape
        return _laid_out(self._unpack(packed, order, stored[-1]), granularity).contiguous()

    def pack_qparams(self, qparams: QParams, spec: QTensorConfig, granularity: Granularity, order: str) -> dict[str, Tensor]:
        scale = _laid_out(qparams.scale, granularity)
        if qparams.zero_point is None:
            shape, dtype = _packed_kind(self, tuple(scale.shape), order)
            stored = torch.zeros(shape, dtype=dtype, device=scale.device)
            return {"scale": scale_format_of(spec).encode(scale.contiguous()), "zero_point": stored}
        zero = _laid_out(qparams.zero_point, granularity)
        if spec.zero_point_type is ZeroPointType.float32 and not spec.symmetric:
            stored = zero.contiguous()
        elif zero.ndim or self.bits >= 8:
            stored = self._pack(zero.to(self.storage_dtype).contiguous(), order)
        else:
            stored = zero.to(self.storage_dtype)
        return {"scale": scale_format_of(spec).encode(scale.contiguous()), "zero_point": stored}

    def unpack_qparams(
        self, tensors: dict[str, Tensor], spec: QTensorConfig, granularity: Granularity, order: str, shape: tuple[int, ...]
    ) -> QParams:
        scale = scale_format_of(spec).decode(_laid_out(tensors["scale"], granularity).contiguous())
        stored = tensors.get("zero_point")
        if spec.symmetric or stored is None:
            return QParams(scale)
        if spec.zero_point_type is ZeroPointType.float32 or (stored.ndim == 0 and self.bits < 8):
            whole = spec.zero_point_type is ZeroPointType.int32
            return QParams(scale, _laid_out(stored.to(torch.int32) if whole else stored, granularity).contiguous())
        zero = self._unpack(stored, order, tensors["scale"].shape[-1] if stored.ndim else 1)
        return QParams(scale, _laid_out(zero, granularity).to(torch.int32).contiguous())

    def _pack(self, codes: Tensor, order: str) -> Tensor:
        if self.bits == 4:
            return pack_nibbles(codes, order)
        if codes.dtype is torch.uint16:
            return codes.view(torch.int16)
        return pack_bits(codes, self.bits) if self.bits < 4 else codes

    def _unpack(self, packed: Tensor, order: str, length: int) -> Tensor:
        if self.bits == 4:
            return unpack_nibbles(packed, order, length, signed=self.signed)
        if self.storage_dtype is torch.uint16:
            return packed.view(torch.uint16)
        return unpack_bits(packed, self.bits, length, signed=self.signed) if self.bits < 4 else packed


@lru_cache(maxsize=1024)
def _packed_kind(packing: IntegerPacking, shape: tuple[int, ...], order: str) -> tuple[torch.Size, torch.dtype]:
    """Return the shape and dtype of packed zero points for scales of the shape ``shape``."""
    zero = torch.empty(shape, dtype=packing.storage_dtype, device="meta")
    packed = packing._pack(zero, order) if shape or packing.bits >= 8 else zero
    return packed.shape, packed.dtype


def _laid_out(x: Tensor, granularity: Granularity) -> Tensor:
    """Return ``x`` as a checkpoint stores it: transposed if the weight has a scale per group.

    ``x`` may be codes, scales or zero points. Calling the function on its result undoes it.
    """
    return x.t() if isinstance(granularity, PerGroup) and x.ndim == 2 else x


@attrs.frozen(kw_only=True)
class WholeNumbers(NumberFormat):
    """Base of the formats whose codes are integers, such as block floating point with integer mantissas."""

    def encode(self, t: Tensor) -> Tensor:
        return t.to(self.storage_dtype)

    def decode(self, codes: Tensor) -> Tensor:
        return codes.float()


def _half_up(t: Tensor) -> Tensor:
    """Round to integers in place. Halfway values are rounded up."""
    # floor(t + 0.5) would also round up the largest number below 0.5.
    return torch.where(t - t.floor() >= 0.5, t.ceil(), t.floor(), out=t)


def _half_away(t: Tensor) -> Tensor:
    """Round to integers in place. Halfway values are rounded away from zero."""
    down = t.trunc()
    return torch.where((t - down).abs_() >= 0.5, down + t.sign(), down, out=t)


_ROUNDINGS: dict[RoundType, Callable[[Tensor], Tensor]] = {
    RoundType.half_even: torch.Tensor.round_,
    RoundType.round: _half_up,
    RoundType.floor: _half_away,
}
"""Rounding method → function that rounds to the nearest integers in place.

They differ only for halfway values. Source: the kernel of AMD Quark 0.13 for one scale per tensor on a GPU.
The other code of AMD Quark, and all of its exports, round half to even whatever the method; no method
truncates.
"""


@attrs.frozen(kw_only=True)
class IntegerFormat(WholeNumbers):
    """An integer format of ``bits`` bits.

    Float32 cannot represent every INT32 number. INT32 therefore has power-of-two scales and no zero points:
    then float32 represents code · scale exactly.

    Attributes:
        signed: Whether codes can be negative.
        rounding: How values halfway between two integers are rounded.
    """

    name: str
    bits: int
    signed: bool
    storage_dtype: torch.dtype
    rounding: RoundType = RoundType.half_even
    packing: Packing = attrs.field(
        default=attrs.Factory(lambda self: IntegerPacking(self.bits, self.signed, self.storage_dtype), takes_self=True)
    )

    @property
    def low(self) -> int:
        """The smallest code."""
        return -(1 << (self.bits - 1)) if self.signed else 0

    @property
    def high(self) -> int:
        """The largest code that float32 represents exactly."""
        magnitude_bits = self.bits - self.signed
        return (1 << magnitude_bits) - (1 << max(0, magnitude_bits - _EXACT_BITS))

    def for_spec(self, spec: QTensorConfig) -> Self:
        return self if spec.round_method in (None, self.rounding) else attrs.evolve(self, rounding=spec.round_method)

    def spec_error(self, spec: QTensorConfig) -> str | None:
        missing = [name for name in ("is_dynamic", "qscheme", "symmetric") if getattr(spec, name) is None]
        if missing:
            return f"{self.name} needs {' and '.join(missing)}: set them, or use a *Spec helper"
        if spec.scale_calculation_mode not in (None, "ceil", "floor"):
            return f"{self.name} needs scale_calculation_mode 'ceil' or 'floor' for its scales, not {spec.scale_calculation_mode!r}"
        if self.bits > _EXACT_BITS and not isinstance(scale_format_of(spec), PowerOfTwoScales):
            return f"{self.name} has power-of-two scales: leave out scale_format, and set scale_type to ScaleType.float or pof2"
        return scale_error(spec)

    def canonicalize(self, spec: QTensorConfig) -> TensorSpec:
        if spec.symmetric and not self.signed and "centred" in observer_class(spec).options:
            spec = attrs.evolve(spec, symmetric=False, observer_options=(*spec.observer_options, ("centred", True)))
        if self.bits > _EXACT_BITS:
            scale_type = ScaleType.pof2 if isinstance(scale_format_of(spec), PlainScales) else spec.scale_type
            spec = attrs.evolve(spec, symmetric=None if spec.symmetric is None else True, scale_type=scale_type)
        return with_outer_scale(spec)

    def by_reciprocal(self, spec: QTensorConfig) -> bool:
        return True

    def device_code(self, spec: QTensorConfig) -> DeviceCode | None:
        if self.rounding is not RoundType.half_even or self.bits > _EXACT_BITS or self.storage_dtype is torch.uint16:
            return None  # torch rounds these: no kernel for int32, uint16 or another halfway rule has been run on a GPU
        from quark_schemes.kernels.integer import integer_code

        zero = "none" if spec.symmetric else "real" if spec.zero_point_type is ZeroPointType.float32 else "whole"
        return integer_code(self.low, self.high, zero, scale_format_of(spec).rounding)

    def max_magnitude(self, spec: QTensorConfig) -> float:
        return (self.high - self.low) / 2 if self.bits <= _EXACT_BITS else self.high

    def spacing(self, spec: QTensorConfig) -> Spacing:
        steps = self.high - self.low if spec.symmetric is False or not self.signed else -self.low
        return Spacing(smallest=1.0, largest=float(steps), steps=steps)

    def qparams(self, low: Tensor, high: Tensor, spec: QTensorConfig) -> QParams:
        if spec.zero_point_type is ZeroPointType.float32 and not spec.symmetric:
            return self._real_zero_point(low, high, spec)
        low, high = low.clamp(max=0), high.clamp(min=0)
        if spec.symmetric:
            # Symmetric specs of unsigned formats have the zero point 0 too, as in AMD Quark: negative values
            # become 0. If an observer centres the zero point, `canonicalize` has made the spec asymmetric.
            scale = divided(torch.maximum(-low, high), self.max_magnitude(spec))
            return QParams(scale_format_of(spec).round(scale.clamp_(min=smallest_scale(self.max_magnitude(spec)))))
        scale = scale_format_of(spec).round(divided(high - low, self.high - self.low).clamp_(min=SMALLEST_SCALE))
        zero = (self.low - torch.round(low / scale.float())).clamp_(self.low, self.high)  # NaN for infinite ranges, which the run refuses
        return QParams(scale, zero.to(torch.int32))

    def _real_zero_point(self, low: Tensor, high: Tensor, spec: QTensorConfig) -> QParams:
        """Return scales and floating-point zero points.

        The range need not contain 0. Zero points are not rounded, and may be below the smallest code or above
        the largest code.
        """
        scale = divided(high - low, self.high - self.low)
        scale = scale_format_of(spec).round(torch.where(scale <= SMALLEST_SCALE, torch.ones_like(scale), scale))
        return QParams(scale, -low / scale.float())

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        # An integer zero point shifts codes but does not change which values are halfway: round them to even
        # before the shift.
        round_whole_ = _ROUNDINGS[self.rounding]
        if zero is not None and zero.is_floating_point():
            round_whole_(t.add_(zero))
        else:
            round_whole_(t)
            if zero is not None:
                t.add_(zero)
        return t.clamp_(self.low, self.high)

    def write_codes(self, t: Tensor, zero: Tensor | None, out: Tensor) -> None:
        # Torch converts to int8 much faster than to uint8. Codes below 128 have the same bytes in both
        # dtypes.
        (out.view(torch.int8) if out.dtype is torch.uint8 and self.high < 128 else out).copy_(self.round_(t, zero))


INT2 = IntegerFormat(name="int2", bits=2, signed=True, storage_dtype=torch.int8)
UINT2 = IntegerFormat(name="uint2", bits=2, signed=False, storage_dtype=torch.uint8)
INT3 = IntegerFormat(name="int3", bits=3, signed=True, storage_dtype=torch.int8)
INT4 = IntegerFormat(name="int4", bits=4, signed=True, storage_dtype=torch.int8)
UINT4 = IntegerFormat(name="uint4", bits=4, signed=False, storage_dtype=torch.uint8)
INT8 = IntegerFormat(name="int8", bits=8, signed=True, storage_dtype=torch.int8)
UINT8 = IntegerFormat(name="uint8", bits=8, signed=False, storage_dtype=torch.uint8)
INT16 = IntegerFormat(name="int16", bits=16, signed=True, storage_dtype=torch.int16)
UINT16 = IntegerFormat(name="uint16", bits=16, signed=False, storage_dtype=torch.uint16)
INT32 = IntegerFormat(name="int32", bits=32, signed=True, storage_dtype=torch.int32)
