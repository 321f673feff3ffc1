"""Kernels get tensors of values or codes, and tensors of any strides get the result."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quark.config.enums import Dtype
from quark.config.tensor import QTensorConfig
from quark.numbers import QParams, kernel_rounding, quantizer_for
from quark.numbers.kernels import DeviceCode, Runs
from quark.numbers.single_level import SingleLevelQuantizer
from quark_devkit.example_specs import int8_spec

CODE = DeviceCode(round=None)


@pytest.fixture
def level(monkeypatch: pytest.MonkeyPatch) -> SingleLevelQuantizer:
    """A quantizer whose device uses kernels and whose format has device code."""
    monkeypatch.setattr(kernel_rounding, "uses_kernels", lambda device: True)
    monkeypatch.setattr(kernel_rounding, "device_code", lambda level: CODE)
    return quantizer_for(int8_spec(), activation=False).stored_level


@pytest.mark.parametrize(
    ("x", "expected"), [(torch.ones(4, 8), True), (torch.ones(0, 8), False), (torch.ones(4, 8, dtype=torch.float64), False)]
)
def test_fused_rounding_is_for_values_of_the_dtypes_of_models(x: Tensor, expected: bool, level: SingleLevelQuantizer) -> None:
    found = kernel_rounding.fused_rounding(level, x)
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
    found = kernel_rounding.FusedRounding(level, CODE, Runs(12)).rounded(x.clone(), QParams(torch.ones(1)), out := x.clone())
    assert found is out
    assert torch.equal(out, x + 1)


@pytest.mark.parametrize(
    ("codes", "out", "expected"),
    [
        (torch.ones(4, 8, dtype=torch.int8), torch.ones(4, 8), True),
        (torch.ones(4, 8, dtype=torch.int16), torch.ones(4, 8), False),
        (torch.ones(4, 8, dtype=torch.int8), torch.ones(4, 8, dtype=torch.float64), False),
        (torch.ones(0, 8, dtype=torch.int8), torch.ones(0, 8), False),
    ],
)
def test_fused_decoding_is_for_codes_of_a_byte(codes: Tensor, out: Tensor, expected: bool, level: SingleLevelQuantizer) -> None:
    assert (kernel_rounding.fused_decoding(level, codes, out) is not None) is expected


@pytest.mark.parametrize("dtype", [Dtype.int8, Dtype.uint4, Dtype.fp4, Dtype.fp8_e4m3])
def test_values_of_codes_come_from_a_table_of_all_bytes(dtype: Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(code: DeviceCode, x: Tensor, out: Tensor, scales: list[Tensor | None], runs: Runs, **settings: Any) -> None:
        assert (x.dtype, settings["encode"], settings["finding"]) == (torch.uint8, False, None)
        if dtype in (Dtype.uint4, Dtype.fp4):  # a decoder is asked for codes alone
            assert torch.equal(settings["table"].view(16, 16), settings["table"][:16].expand(16, 16))
        out.copy_(settings["table"][x.long()] * scales[0])

    spec = QTensorConfig(dtype=dtype, qscheme="per_tensor", symmetric=True, is_dynamic=False, observer_cls="MinMaxObserver")
    quantizer, x = quantizer_for(spec, activation=False), torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
    scales = quantizer.find_qparams(x)
    codes, out = quantizer.quantize(x, scales), torch.zeros(1, 32)
    expected = quantizer.dequantize(codes, scales)
    monkeypatch.setattr(kernel_rounding, "uses_kernels", lambda device: True)
    monkeypatch.setattr(kernel_rounding, "device_code", lambda level: CODE)
    monkeypatch.setitem(sys.modules, "quark.numbers.kernels.rounding", SimpleNamespace(launch=launch))
    quantizer.dequantize_to(codes, scales, out)
    assert torch.equal(out, expected)
