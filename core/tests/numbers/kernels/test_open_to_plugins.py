"""A plugin's number format gets a kernel if it has device code for its arithmetic, and else needs none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quark.base.scalars import divided
from quark.config.tensor import QTensorConfig
from quark.numbers import NumberFormat, Observer, PerGroup, QParams
from quark.numbers.kernels import DeviceCode
from quark.numbers.single_level import SingleLevelQuantizer

LARGEST = 5.0


class LargestMagnitude(Observer):
    """Ranges up to the largest magnitude of a group."""

    is_extremes = True

    def observe(self, x: Tensor) -> None:
        self.high = self.granularity.rows(x).abs().amax(1).float().reshape(self.granularity.scale_shape(tuple(x.shape)))

    def range(self) -> tuple[Tensor, Tensor]:
        return -self.high, self.high

    def merge(self, other: Observer) -> None:
        raise NotImplementedError


class TowardZero(NumberFormat):
    """Whole numbers up to 5, towards zero."""

    name, bits, storage_dtype = "acme", 4, torch.int8

    def max_magnitude(self, spec: QTensorConfig) -> float:
        return LARGEST

    def round_(self, t: Tensor, zero: Tensor | None = None) -> Tensor:
        return t.clamp_(-LARGEST, LARGEST).trunc_()

    def encode(self, t: Tensor) -> Tensor:
        return t.to(torch.int8)

    def decode(self, codes: Tensor) -> Tensor:
        return codes.float()

    def qparams(self, low: Tensor, high: Tensor, spec: QTensorConfig) -> QParams:
        return QParams(divided(high + (high == 0), LARGEST))


class WithDeviceCode(TowardZero):
    """`TowardZero` with device code for kernels."""

    def device_code(self, spec: QTensorConfig) -> DeviceCode:
        from .acme_device_code import round_toward_zero, scales

        return DeviceCode(round=round_toward_zero, scales=scales, parameters=LARGEST)


def quantizer(number_format: NumberFormat) -> SingleLevelQuantizer:
    spec = QTensorConfig(dtype="int4", qscheme="per_group", ch_axis=-1, group_size=16, is_dynamic=False)
    return SingleLevelQuantizer(spec, PerGroup(16), number_format, LargestMagnitude)


@pytest.fixture
def launched(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return, for each launched kernel, whether it computed scales."""
    from quark.numbers.kernels import rounding

    calls: list[bool] = []
    launch = rounding.launch

    def counted(*arguments: Any, **settings: Any) -> None:
        calls.append(settings["finding"] is not None)
        launch(*arguments, **settings)

    monkeypatch.setattr(rounding, "launch", counted)
    return calls


def test_its_arithmetic_makes_a_kernel(kernels: Any, launched: list[bool]) -> None:
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(0))
    expected, scales = quantizer(WithDeviceCode()).round_to_nearest(x)
    assert launched == []
    with kernels.on() as device:
        found, own = quantizer(WithDeviceCode()).round_to_nearest(x.to(device))
        under = quantizer(WithDeviceCode()).fake_quantize(x.to(device), scales.map(lambda s: s.to(device)))
        codes = quantizer(WithDeviceCode()).quantize(x.to(device), own)
    assert launched == [True, False]  # it brings no codes
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(under.cpu(), expected)
    assert torch.equal(own.scale.cpu(), scales.scale)
    assert torch.equal(codes.cpu(), quantizer(TowardZero()).quantize(x, scales))


def test_without_it_torch_rounds_on_every_device(kernels: Any, launched: list[bool]) -> None:
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(0))
    expected = quantizer(TowardZero()).round_to_nearest(x)[0]
    with kernels.on() as device:
        found = quantizer(TowardZero()).round_to_nearest(x.to(device))[0]
    assert launched == []
    torch.testing.assert_close(found.cpu(), expected)
