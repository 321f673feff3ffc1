"""Kernels get tensors of values, and tensors of any strides get the result."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quark.numbers import QParams, fused, quantizer_for
from quark.numbers.kernels import DeviceCode, Runs
from quark.numbers.single_level import SingleLevelQuantizer
from quark_devkit.example_specs import int8_spec

CODE = DeviceCode(round=None)


@pytest.fixture
def level(monkeypatch: pytest.MonkeyPatch) -> SingleLevelQuantizer:
    """A quantizer whose device uses kernels and whose format has device code."""
    monkeypatch.setattr(fused, "uses_kernels", lambda device: True)
    monkeypatch.setattr(fused, "device_code", lambda level: CODE)
    return quantizer_for(int8_spec(), activation=False).stored_level


@pytest.mark.parametrize(
    ("x", "expected"), [(torch.ones(4, 8), True), (torch.ones(0, 8), False), (torch.ones(4, 8, dtype=torch.float64), False)]
)
def test_fused_rounding_is_for_values_of_the_dtypes_of_models(x: Tensor, expected: bool, level: SingleLevelQuantizer) -> None:
    found = fused.fused_rounding(level, x)
    assert (found is not None) is expected
    assert found is None or (found.level, found.code, found.runs) == (level, CODE, level.granularity.runs(tuple(x.shape)))


@pytest.mark.parametrize("is_transposed", [False, True])
def test_fused_rounding_fills_its_output_whatever_its_strides(
    is_transposed: bool, level: SingleLevelQuantizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(code: DeviceCode, x: Tensor, out: Tensor, scales: list[Tensor | None], runs: Runs, **_: Any) -> None:
        assert x.is_contiguous()
        assert out.is_contiguous()
        out.copy_(x + 1)

    monkeypatch.setitem(sys.modules, "quark.numbers.kernels.rounding", SimpleNamespace(launch=launch))
    x = torch.arange(12.0).reshape(3, 4)
    x = x.t() if is_transposed else x
    found = fused.FusedRounding(level, CODE, Runs(12)).rounded(x.clone(), QParams(torch.ones(1)), out := x.clone())
    assert found is out
    assert torch.equal(out, x + 1)
