"""A healthy number format, and others that differ from it in one thing each."""

from __future__ import annotations

import time
from typing import Any

import attrs
import torch
from torch import Tensor

from quark.base.scalars import divided
from quark.config.enums import RoundType
from quark.config.layer import TensorSpec
from quark.config.tensor import QTensorConfig
from quark.numbers import Granularity, NumberFormat, Packing, QParams, Spacing

_SMALLEST = float(torch.finfo(torch.float32).tiny)


class Nibbles(Packing):
    """Two codes in a byte."""

    def pack(self, codes: Tensor, granularity: Granularity, order: str) -> Tensor:
        whole = torch.nn.functional.pad(codes, (0, codes.shape[-1] % 2)).view(torch.uint8) & 15
        return whole[..., ::2] | (whole[..., 1::2] << 4)

    def unpack(self, packed: Tensor, granularity: Granularity, order: str, shape: tuple[int, ...]) -> Tensor:
        pairs = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)[..., : shape[-1]]
        return ((pairs ^ 8).view(torch.int8) - 8).contiguous()


class UnmasksInPlace(Nibbles):
    def pack(self, codes: Tensor, granularity: Granularity, order: str) -> Tensor:
        return super().pack(codes, granularity, order).bitwise_not_()

    def unpack(self, packed: Tensor, granularity: Granularity, order: str, shape: tuple[int, ...]) -> Tensor:
        return super().unpack(packed.bitwise_not_(), granularity, order, shape)


class Plain(NumberFormat):
    """Four-bit integers, with zero points: the healthy format from which the mutants differ in one thing."""

    name = "mutant_format"
    bits: float = 4
    storage_dtype: Any = torch.int8
    packing: Any = Nibbles()

    def max_magnitude(self, spec: QTensorConfig) -> float:
        return 7.5

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        t.round_()
        return (t if zero is None else t.add_(zero)).clamp_(-8, 7)

    def encode(self, t: Tensor) -> Tensor:
        return t.to(torch.int8)

    def decode(self, codes: Tensor) -> Tensor:
        return codes.float()

    def qparams(self, low: Tensor, high: Tensor, spec: QTensorConfig) -> QParams:
        if spec.symmetric is not False:
            return super().qparams(low, high, spec)
        low, high = low.clamp(max=0), high.clamp(min=0)
        scale = divided(high - low, 15).clamp_(min=_SMALLEST)
        return QParams(scale, (-8 - torch.round(low / scale)).clamp_(-8, 7).to(torch.int32))

    def spec_error(self, spec: QTensorConfig) -> str | None:
        return super().spec_error(spec.set(symmetric=None))

    def spacing(self, spec: QTensorConfig) -> Spacing | None:
        return Spacing(smallest=1.0, largest=15.0, steps=15)


class DecodesByTable(Plain):
    table = torch.arange(-8.0, 8.0)

    def decode(self, codes: Tensor) -> Tensor:
        return self.table[codes.long() + 8]


class ReturnsAnother(Plain):
    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return super().round_(t.clone(), zero)


class ReturnsNone(Plain):
    def round_(self, t: Tensor, zero: Tensor | None = None) -> Any:
        super().round_(t, zero)


class Counts(Plain):
    calls = 0

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        self.calls += 1
        return super().round_(t.add_(0.3 * (self.calls % 2)), zero)


class Creeps(Plain):
    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return super().round_(t.mul_(0.8), zero)


class HalfTheValues(Plain):
    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return super().round_(t.div_(2).round_().mul_(2), zero).clamp_(-8, 6)


class OffTheGrid(Plain):
    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return super().round_(t, zero).add_(0.25).clamp_(-8, 7)


class Falls(Plain):
    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        swapped = torch.where((t > 2) & (t < 2.2), t + 1.5, t)
        return super().round_(t.copy_(swapped), zero)


class Wraps(Plain):
    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        t.round_()
        return t.copy_((t + 8).remainder(16) - 8).nan_to_num_(7.0)


class DoesNotSaturate(Plain):
    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return t.round_() if zero is None else super().round_(t, zero)


class ClaimsMore(Plain):
    def max_magnitude(self, spec: QTensorConfig) -> float:
        return 12.0


class HidesNan(Plain):
    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return super().round_(t.nan_to_num_(0.0), zero)


class MakesNan(Plain):
    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return super().round_(t.mul_(t / t), zero)


class NoZero(Plain):
    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        super().round_(t, zero)
        return t.masked_fill_(t == 0, 1.0)


class SharesScratch(Plain):
    scratch: Tensor

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        self.scratch = t.clone()
        time.sleep(0.002)
        return t.copy_(super().round_(self.scratch.clone(), zero))


class AnyMethod(Plain):
    """Accepts every rounding method, and rounds one of them upwards."""

    method: RoundType | None = None

    def spec_error(self, spec: QTensorConfig) -> str | None:
        return super().spec_error(spec.set(round_method=None))

    def for_spec(self, spec: QTensorConfig) -> NumberFormat:
        own = AnyMethod()
        own.method = spec.round_method
        return own

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return super().round_(t.ceil_() if self.method is RoundType.floor else t, zero)


class Elements(Plain):
    """One element of `Coupled`."""


class Coupled(Plain):
    """A pair that is small has half the step; the subscales say something else."""

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        sub = self.true_subscales(t)
        return t.copy_(super().round_(t / sub, zero) * sub)

    def true_subscales(self, t: Tensor) -> Tensor:
        small = (t.view(-1, 2).abs() < 3).all(1, keepdim=True).expand(-1, 2).reshape(t.shape)
        return torch.where(small, 0.5, 1.0)

    def subscales(self, t: Tensor) -> Tensor | None:
        return torch.ones_like(t)

    def element_format(self) -> NumberFormat:
        return Elements()


class EncodesWide(Plain):
    def encode(self, t: Tensor) -> Tensor:
        return t.to(torch.int16)


class DecodesToHalf(Plain):
    def decode(self, codes: Tensor) -> Tensor:
        return codes.to(torch.bfloat16)


class DecodesElse(Plain):
    def decode(self, codes: Tensor) -> Tensor:
        return codes.float().clamp_(max=6)


class OtherCodes(Plain):
    def codes(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return super().codes(t.mul_(0.99), zero)


class EncodesInPlace(Plain):
    def encode(self, t: Tensor) -> Tensor:
        return t.add_(0.25).to(torch.int8)


class LosesTheLast(Nibbles):
    def unpack(self, packed: Tensor, granularity: Granularity, order: str, shape: tuple[int, ...]) -> Tensor:
        codes = super().unpack(packed, granularity, order, shape)
        codes[..., -1] = 0
        return codes


class LosesTheLowest(Nibbles):
    def pack(self, codes: Tensor, granularity: Granularity, order: str) -> Tensor:
        return super().pack(codes.clamp(min=-7), granularity, order)


class SwapsOrder(Nibbles):
    def unpack(self, packed: Tensor, granularity: Granularity, order: str, shape: tuple[int, ...]) -> Tensor:
        codes = super().unpack(packed, granularity, order, shape)
        return codes.flip(-1) if order == "order" else codes


class LooksAtValues(Nibbles):
    def pack(self, codes: Tensor, granularity: Granularity, order: str) -> Tensor:
        return super().pack(codes, granularity, order) if int(codes.max()) > -100 else codes


class DependsOnData(Nibbles):
    def pack(self, codes: Tensor, granularity: Granularity, order: str) -> Tensor:
        return super().pack(codes, granularity, order).to(torch.int16 if codes.is_meta else torch.uint8)


class HalfScales(Nibbles):
    def pack_qparams(self, qparams: QParams, spec: QTensorConfig, granularity: Granularity, order: str) -> dict[str, Tensor]:
        return super().pack_qparams(attrs.evolve(qparams, scale=qparams.scale.half()), spec, granularity, order)


class ClashingScales(Nibbles):
    def pack_qparams(self, qparams: QParams, spec: QTensorConfig, granularity: Granularity, order: str) -> dict[str, Tensor]:
        packed = super().pack_qparams(qparams, spec, granularity, order)
        return packed | {"": packed["scale"]}


class WrongName(Plain):
    default_observer = "NoSuchObserver"


class ServesNothing(Plain):
    def spec_error(self, spec: QTensorConfig) -> str | None:
        return "it serves nothing"


class AnswersTrue(Plain):
    def spec_error(self, spec: QTensorConfig) -> Any:
        return super().spec_error(spec) is not None or None


class RaisesForOdd(Plain):
    def spec_error(self, spec: QTensorConfig) -> str | None:
        return super().spec_error(spec) if spec.qscheme.name else None  # type: ignore[union-attr]


class AcceptsScales(Plain):
    def spec_error(self, spec: QTensorConfig) -> str | None:
        return super().spec_error(spec.set(scale_format=None))


class AcceptsModes(Plain):
    def spec_error(self, spec: QTensorConfig) -> str | None:
        return super().spec_error(spec.set(scale_calculation_mode=None))


class GrowsGroups(Plain):
    def canonicalize(self, spec: QTensorConfig) -> TensorSpec:
        return spec if spec.group_size in (None, -1) else spec.set(group_size=spec.group_size * 2)


class CanonicalizesToNothing(Plain):
    def canonicalize(self, spec: QTensorConfig) -> Any:
        return None


class ScaleOfAll(Plain):
    def qparams(self, low: Tensor, high: Tensor, spec: QTensorConfig) -> QParams:
        return super().qparams(low.min(), high.max(), spec)


class ScaleOfZero(Plain):
    def qparams(self, low: Tensor, high: Tensor, spec: QTensorConfig) -> QParams:
        return QParams(torch.maximum(low.abs(), high.abs()) / 7.5)


class ScaleIsNan(Plain):
    def qparams(self, low: Tensor, high: Tensor, spec: QTensorConfig) -> QParams:
        qparams = super().qparams(low, high, spec)
        return attrs.evolve(qparams, scale=qparams.scale * ((high - low) / (high - low)))


class NegativeScale(Plain):
    def qparams(self, low: Tensor, high: Tensor, spec: QTensorConfig) -> QParams:
        return QParams(high / 7.5)


class ScaleInDouble(Plain):
    def qparams(self, low: Tensor, high: Tensor, spec: QTensorConfig) -> QParams:
        return super().qparams(low.double(), high.double(), spec)


class ScaleIsTensor(Plain):
    def qparams(self, low: Tensor, high: Tensor, spec: QTensorConfig) -> Any:
        return super().qparams(low, high, spec).scale


class ChangesRanges(Plain):
    def qparams(self, low: Tensor, high: Tensor, spec: QTensorConfig) -> QParams:
        return super().qparams(low.mul_(2), high.mul_(2), spec)


class QuarterScale(Plain):
    def qparams(self, low: Tensor, high: Tensor, spec: QTensorConfig) -> QParams:
        qparams = super().qparams(low, high, spec)
        return attrs.evolve(qparams, scale=qparams.scale / 4)


class RoundsNothing(Plain):
    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return t


class BreaksVectors(Nibbles):
    def unpack(self, packed: Tensor, granularity: Granularity, order: str, shape: tuple[int, ...]) -> Tensor:
        codes = super().unpack(packed, granularity, order, shape)
        return codes if codes.ndim > 1 else codes.flip(0)


class LiftsZeros(Plain):
    def qparams(self, low: Tensor, high: Tensor, spec: QTensorConfig) -> QParams:
        qparams = super().qparams(low, high, spec)
        return attrs.evolve(qparams, scale=qparams.scale.clamp(min=1.0))


class HidesInf(Plain):
    def qparams(self, low: Tensor, high: Tensor, spec: QTensorConfig) -> QParams:
        return super().qparams(low.clamp(-1e6, 1e6).nan_to_num(0), high.clamp(-1e6, 1e6).nan_to_num(0), spec)

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return super().round_(t.nan_to_num_(0.0), zero)


class RefusesEmpty(Plain):
    def qparams(self, low: Tensor, high: Tensor, spec: QTensorConfig) -> QParams:
        return super().qparams(low, high.clamp(max=float(high.max())), spec)


class NoZeroPoint(Plain):
    def qparams(self, low: Tensor, high: Tensor, spec: QTensorConfig) -> QParams:
        return super().qparams(low, high, spec.set(symmetric=True))


class RoundsMatricesElse(Plain):
    """Knows matrices; algorithms hand over their columns."""

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return super().round_(t if t.ndim > 1 else t.add_(0.4), zero)


class PacksElse(Nibbles):
    """Stores other codes where a group has a scale of its own, and reads them as they are."""

    def pack_qparams(self, qparams: QParams, spec: QTensorConfig, granularity: Granularity, order: str) -> dict[str, Tensor]:
        return super().pack_qparams(qparams.map(lambda x: x.half().float() if x.is_floating_point() else x), spec, granularity, order)


class LeavesColumns(Plain):
    """Rounds matrices alone."""

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return super().round_(t, zero) if t.ndim > 1 else t
