"""Broken formats and observers are refused by name when a plan is made, before any weight is touched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import quark_tiny_model as tiny
from quark.config.layer import QLayerConfig, levels
from quark.config.model import QConfig
from quark.config.tensor import QTensorConfig
from quark.errors import PluginError
from quark.numbers import Packing, QParams, number_format, observer_class, quantizer_for
from quark.numbers.self_check import refuse_broken
from quark.plugins import FormatRecord, ObserverRecord, Source, formats, observers, schemes
from quark.runs import ModelQuantizer
from quark.torch import export_safetensors

BROKEN = Source("broken-quant", "0.3")
INT4: Any = type(number_format("int4"))
MIN_MAX: Any = observer_class(QTensorConfig(dtype="int4"))


class Loud(INT4):
    """A correct format with the simplest packing: int8 as it is."""

    stored = Packing()


class NotSaturating(Loud):
    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return t.round_()

    class FourBits(Packing):
        def pack(self, codes: Tensor, granularity: Any, order: str) -> Tensor:
            return codes & 15

        def unpack(self, packed: Tensor, granularity: Any, order: str, shape: tuple[int, ...]) -> Tensor:
            return (packed << 4) >> 4

    stored = FourBits()


class Wraps(Loud):
    """Wraps values instead of saturating; the results have codes, which survive packing."""

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return t.copy_((t.double().round() + 8).remainder(16).sub(8))


class WrapsFarOut(Loud):
    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return t.copy_(torch.where(t.abs() > 2.0**31, -8.0, t.round().clamp(-8, 7)).where(~t.isnan(), t))


class WithoutCodes(Loud):
    def decode(self, codes: Tensor) -> Tensor:
        raise NotImplementedError("its values have no codes")


class SaysTooMuch(Loud):
    def max_magnitude(self, spec: Any) -> float:
        return 15.0


class SaysTooLittle(Loud):
    def max_magnitude(self, spec: Any) -> float:
        return 6.0


class SaysNothing(Loud):
    def max_magnitude(self, spec: Any) -> float:
        return 0.0


class MoreValuesThanCodes(Loud):
    """Has more values than 4 bits can represent, although record and class say 4 bits."""

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return t.mul_(2).round_().clamp_(-15, 15).div_(2)

    def encode(self, t: Tensor) -> Tensor:
        return (t * 2).nan_to_num_(0.0).to(torch.int8)

    def decode(self, codes: Tensor) -> Tensor:
        return codes.float() / 2

    def codes(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return self.encode(self.round_(t, zero))

    def write_codes(self, t: Tensor, zero: Tensor | None, out: Tensor) -> None:
        out.copy_(self.codes(t, zero))


class NotIdempotent(Loud):
    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return t.mul_(1.3).round_().clamp_(-8, 7)


class NotInPlace(Loud):
    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return t.round().clamp(-8, 7)


class ReturnsNone(Loud):
    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        super().round_(t, zero)
        return None  # type: ignore[return-value]


class OffGrid(Loud):
    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return super().round_(t, zero).add_(0.25)


class HalfValues(Loud):
    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return t.mul_(2).round_().div_(2).clamp_(-8, 7)


class MakesNan(Loud):
    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return super().round_(t, zero).masked_fill_(t == 0, torch.nan)


class HidesNan(Loud):
    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return super().round_(t.nan_to_num_(0.0), zero)


class DecodeNotInverse(Loud):
    def decode(self, codes: Tensor) -> Tensor:
        return codes.float() * 1.01


class StorageLie(Loud):
    def decode(self, codes: Tensor) -> Tensor:
        return codes.to(torch.uint8).float()


class PackLossy(Loud):
    class Broken(Packing):
        def pack(self, codes: Tensor, granularity: Any, order: str) -> Tensor:
            return codes & -2

    stored = Broken()


class PackLossyInOneOrder(Loud):
    class Broken(Packing):
        def unpack(self, packed: Tensor, granularity: Any, order: str, shape: tuple[int, ...]) -> Tensor:
            return packed if order == "order" else packed.flip(-1)

    stored = Broken()


class PackWrongShape(Loud):
    class Broken(Packing):
        def pack(self, codes: Tensor, granularity: Any, order: str) -> Tensor:
            return codes if codes.is_meta else codes[:, :-1]

    stored = Broken()


class PackWrongDtype(Loud):
    class Broken(Packing):
        def pack(self, codes: Tensor, granularity: Any, order: str) -> Tensor:
            return codes if codes.is_meta else codes.short()

    stored = Broken()


class UnpackWrongShape(Loud):
    class Broken(Packing):
        def unpack(self, packed: Tensor, granularity: Any, order: str, shape: tuple[int, ...]) -> Tensor:
            return packed[:-1]

    stored = Broken()


class UnpackRaises(Loud):
    class Broken(Packing):
        def unpack(self, packed: Tensor, granularity: Any, order: str, shape: tuple[int, ...]) -> Tensor:
            raise IndexError("lost")

    stored = Broken()


class QparamsNan(Loud):
    def qparams(self, low: Tensor, high: Tensor, spec: Any) -> QParams:
        return super().qparams(low, high, spec).map(lambda x: x * torch.nan)


class QparamsZero(Loud):
    def qparams(self, low: Tensor, high: Tensor, spec: Any) -> QParams:
        return QParams(high / 7)


class QparamsNegative(Loud):
    def qparams(self, low: Tensor, high: Tensor, spec: Any) -> QParams:
        return super().qparams(low, high, spec).map(lambda x: -x)


class QparamsBare(Loud):
    def qparams(self, low: Tensor, high: Tensor, spec: Any) -> QParams:
        return high / 7  # type: ignore[return-value]


class ScaleLost(Loud):
    class Broken(Packing):
        def unpack_qparams(self, tensors: Any, spec: Any, granularity: Any, order: str, shape: tuple[int, ...]) -> QParams:
            return super().unpack_qparams(tensors, spec, granularity, order, shape).map(torch.ones_like)

    stored = Broken()


class ScaleHalf(Loud):
    class Broken(Packing):
        def pack_qparams(self, qparams: QParams, spec: Any, granularity: Any, order: str) -> dict[str, Tensor]:
            found: dict[str, Tensor] = super().pack_qparams(qparams, spec, granularity, order)
            return found | {"scale": found["scale"].half()}

    stored = Broken()


class PackLooksAtDevice(Loud):
    """Packs correctly, but to another dtype for tensors without values than for tensors with values."""

    class Broken(Packing):
        def pack(self, codes: Tensor, granularity: Any, order: str) -> Tensor:
            return codes.short() if codes.is_meta else codes

    stored = Broken()


FORMATS: dict[type, str] = {
    NotSaturating: "has codes that do not survive packing",
    Wraps: r"rounds -8\.50\d* to 7 and -8\.49\d* to -8: order must be kept, and values beyond max_magnitude=7\.5 must saturate",
    WrapsFarOut: r"rounds 22\.5 to 7 and 3\.40282e\+38 to -8: .* saturate",
    SaysTooMuch: r"says max_magnitude=15, and its values reach 7\.5",
    SaysTooLittle: r"says max_magnitude=6, and its values reach 7\.5",
    SaysNothing: r"max_magnitude=0\.0 instead of a positive number|a scale that is NaN, infinite",
    MoreValuesThanCodes: "says bits=4, enough for 16 values, but has 31",
    NotIdempotent: "values that no code represents",
    NotInPlace: "does not round in place",
    ReturnsNone: "does not round in place",
    OffGrid: "values that no code represents",
    HalfValues: "values that no code represents",
    MakesNan: "rounds finite values to NaN or Inf",
    HidesNan: "hides NaN",
    DecodeNotInverse: "values that no code represents",
    StorageLie: "values that no code represents",
    PackLossy: "has codes that do not survive packing",
    PackLossyInOneOrder: "has codes that do not survive packing",
    PackWrongShape: "has codes that do not survive packing",
    PackWrongDtype: "has codes that do not survive packing",
    UnpackWrongShape: "has codes that do not survive packing",
    UnpackRaises: "raised IndexError: lost",
    QparamsNan: "has a scale that is NaN, infinite, zero or negative",
    QparamsZero: "has a scale that is NaN, infinite, zero or negative",
    QparamsNegative: "has a scale that is NaN, infinite, zero or negative",
    QparamsBare: "instead of QParams",
    ScaleLost: "has scales that do not survive packing",
    ScaleHalf: "has scales that do not survive packing",
}
_NAMES = {mutant: f"broken_{mutant.__name__.lower()}" for mutant in (Loud, WithoutCodes, PackLooksAtDevice, *FORMATS)}
globals().update(
    {name: mutant(name=name, bits=4, signed=True, storage_dtype=torch.int8, packing=mutant.stored) for mutant, name in _NAMES.items()}
)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    for name in _NAMES.values():
        formats().register(FormatRecord(name=name, bits=4, format=f"{__name__}:{name}"), BROKEN)
    yield
    for name in _NAMES.values():
        formats().unregister(name)


def spec_of(name: str, **more: Any) -> QTensorConfig:
    return QTensorConfig(dtype=name, qscheme="per_group", ch_axis=-1, group_size=32, symmetric=True, is_dynamic=False, **more)


def plan(spec: QTensorConfig) -> None:
    ModelQuantizer(QConfig(global_quant_config=QLayerConfig(weight=spec))).plan(tiny.tiny_model())


@pytest.mark.parametrize("mutant", FORMATS, ids=lambda m: m.__name__)
def test_a_broken_format_is_refused_by_name(mutant: type) -> None:
    with pytest.raises(PluginError, match=FORMATS[mutant]) as caught:
        plan(spec_of(_NAMES[mutant]))
    assert f"the format '{_NAMES[mutant]}' of broken-quant 0.3" in str(caught.value)


def test_a_format_that_packs_otherwise_than_it_announces_is_named_with_the_layer(tmp_path: Path) -> None:
    model = tiny.tiny_model()
    config = QConfig(global_quant_config=QLayerConfig(weight=spec_of(_NAMES[PackLooksAtDevice])))
    ModelQuantizer(config).quantize_model(model)
    told = (
        rf"the format '{_NAMES[PackLooksAtDevice]}' of broken-quant 0.3 packs real tensors to other shapes or dtypes than meta tensors, "
        r".* \(at 'model.layers.0.self_attn.q_proj.weight'\)"
    )
    with pytest.raises(PluginError, match=told):
        export_safetensors(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_sound_one_is_not() -> None:
    plan(spec_of(_NAMES[Loud]))


def test_activations_need_no_codes_which_nobody_stores() -> None:
    spec = spec_of(_NAMES[WithoutCodes])
    refuse_broken(quantizer_for(spec, activation=True), activation=True)
    with pytest.raises(PluginError, match="its values have no codes"):
        refuse_broken(quantizer_for(spec, activation=False), activation=False)


@pytest.mark.parametrize("scheme", schemes().names())
def test_every_built_in_format_and_observer_passes(scheme: str) -> None:
    layer: QLayerConfig = schemes().load_config(scheme)()
    for slot in ("weight", "input_tensors", "output_tensors"):
        spec, is_activation = getattr(layer, slot), slot != "weight"
        if spec is not None:
            assert levels(spec)
            refuse_broken(quantizer_for(spec, activation=is_activation), activation=is_activation)


class RangeNan(MIN_MAX):
    def range(self) -> tuple[Tensor, Tensor]:
        low, high = super().range()
        return low, high * torch.nan


class RangeInverted(MIN_MAX):
    def range(self) -> tuple[Tensor, Tensor]:
        low, high = super().range()
        return high + 1, low


class RangeOfOne(MIN_MAX):
    def range(self) -> tuple[Tensor, Tensor]:
        low, high = super().range()
        return low.amin(), high.amax()


class RangeInDouble(MIN_MAX):
    def range(self) -> tuple[Tensor, Tensor]:
        low, high = super().range()
        return low.double(), high.double()


class ChangesWhatItSees(MIN_MAX):
    def observe(self, x: Tensor) -> None:
        super().observe(x)
        x.mul_(2)


class Raises(MIN_MAX):
    def observe(self, x: Tensor) -> None:
        raise ZeroDivisionError("oh")


OBSERVERS: dict[Any, str] = {
    RangeNan: "gives a range that is not finite",
    RangeInverted: "gives a range whose low end lies above its high end",
    RangeOfOne: r"gives a range of shape \[\] instead of \[16, 2\]",
    RangeInDouble: "not in float32",
    ChangesWhatItSees: "changes the tensor that it observes",
    Raises: "raised ZeroDivisionError: oh",
}


@pytest.mark.parametrize("mutant", OBSERVERS, ids=lambda m: m.__name__)
def test_a_broken_observer_is_refused_by_name(mutant: Any) -> None:
    name = mutant.__name__.lower()
    observers().register(ObserverRecord(name=name, class_name=mutant.__name__, observer=f"{__name__}:{mutant.__name__}"), BROKEN)
    try:
        with pytest.raises(PluginError, match=OBSERVERS[mutant]) as caught:
            plan(spec_of("int4", observer_cls=mutant.__name__))
    finally:
        observers().unregister(name)
    assert f"the observer '{name}' of broken-quant 0.3" in str(caught.value)
