"""Kernels give the bits of torch's operations on CPUs.

Values, codes, scales and zero points, for every scheme and kind of scale.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import quark
from quark.config.enums import Dtype, RoundType, ScaleType, ZeroPointType
from quark.config.layer import TensorSpec
from quark.config.tensor import QTensorConfig
from quark.numbers import TensorQuantizer, quantizer_for
from tests.kit.interpreted_kernels import Kernels, assert_same_bits

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROWS, COLUMNS = 6, 128


def values(dtype: torch.dtype) -> Tensor:
    """Values of many magnitudes: groups of zeros, of subnormal numbers, of ties, of the largest numbers.

    Both signs of zero.
    """
    g = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, COLUMNS, generator=g) * torch.exp2(torch.randint(-12, 12, (ROWS, 1), generator=g).float())
    x[0, :64], x[0, 64:] = 0.0, -0.0
    x[1, :64] *= 1e-40 if dtype is not torch.float16 else 1e-7
    x[2] = torch.arange(COLUMNS) / 8 - 8.0
    x[3, ::3] = float(torch.finfo(dtype).max) * 0.99
    x[4, 5], x[4, 6] = -0.0, 1e-30
    return x.to(dtype)


def with_broken_rows(dtype: torch.dtype) -> Tensor:
    x = values(dtype)
    x[1, 3], x[2, 5], x[4, 100] = torch.nan, torch.inf, -torch.inf
    return x


def integer(**changes: Any) -> QTensorConfig:
    settings: dict[str, Any] = {"dtype": Dtype.uint4, "qscheme": "per_group", "ch_axis": -1, "group_size": 32, "symmetric": False}
    return QTensorConfig(**{**settings, "is_dynamic": False, "observer_cls": "MinMaxObserver", **changes})


def small_float(**changes: Any) -> QTensorConfig:
    return integer(**{"dtype": Dtype.fp8_e4m3, "symmetric": None, **changes})


def block_float(**changes: Any) -> QTensorConfig:
    return QTensorConfig(**{"dtype": Dtype.mx, "mx_element_dtype": Dtype.int8, "is_dynamic": False, **changes})


OWN: dict[str, TensorSpec] = {
    "real zero points": integer(zero_point_type=ZeroPointType.float32),
    "int8 with zero points": integer(dtype=Dtype.int8),
    "uint8 without zero points": integer(dtype=Dtype.uint8, symmetric=True),
    "int2": integer(dtype=Dtype.int2, symmetric=True),
    "int16": integer(dtype=Dtype.int16, symmetric=True),
    "scales in float16": integer(scale_type=ScaleType.float16),
    "scales in bfloat16": small_float(scale_type=ScaleType.bfloat16),
    "scales in E5M3": integer(scale_type=ScaleType.float8_e5m3, symmetric=True),
    "powers of two": integer(scale_format="e8m0", symmetric=True),
    "lower powers of two": integer(scale_format="e8m0", symmetric=True, scale_calculation_mode="floor"),
    "groups of 24": integer(group_size=128 // 4 * 3, symmetric=True),
    "per tensor": integer(qscheme="per_tensor", group_size=None, ch_axis=None),
    "of rows": small_float(qscheme="per_channel", group_size=None, ch_axis=0),
    "of columns": integer(qscheme="per_channel", group_size=None, ch_axis=1),
    "of blocks": small_float(qscheme="per_block", group_size=None, block_size=(3, 64)),
    "E5M2": small_float(dtype=Dtype.fp8_e5m2),
    **{f"MXFP8 {mode}": small_float(scale_format="e8m0", scale_calculation_mode=mode) for mode in ("even", "floor", "ceil", "rceil")},
    **{f"MXINT8 {mode}": block_float(scale_calculation_mode=mode) for mode in ("even", "rceil")},
}


def of_schemes() -> dict[str, tuple[TensorSpec, bool]]:
    """The specs of all schemes, each once: the spec, and whether it is that of an activation."""
    found: dict[int, tuple[str, TensorSpec, bool]] = {}
    for name in quark.schemes().names():
        config = quark.schemes().load_config(name)()
        for slot, spec in (("weight", config.weight), ("input", config.input_tensors)):
            if spec is not None and not quantizer_for(spec, activation=slot == "input").is_float:
                found.setdefault(id(quantizer_for(spec, activation=slot == "input")), (f"{slot} of {name}", spec, slot == "input"))
    return {name: (spec, activation) for name, spec, activation in found.values()}


CASES = of_schemes() | {name: (spec, False) for name, spec in OWN.items()}


@pytest.fixture(params=CASES)
def quantizer(request: pytest.FixtureRequest) -> TensorQuantizer:
    spec, activation = CASES[request.param]
    return quantizer_for(spec, activation=activation)


def fitting(quantizer: TensorQuantizer, x: Tensor) -> Tensor:
    """Return as much of ``x`` as whole groups cover."""
    return x if quantizer.shape_error(tuple(x.shape)) is None else x[:, :96].contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_codes_and_scales_have_the_same_bits(kernels: Kernels, quantizer: TensorQuantizer, dtype: torch.dtype) -> None:
    x = fitting(quantizer, values(dtype))
    expected, scales = quantizer.round_to_nearest(x)
    with kernels.on() as device:
        found, own = quantizer.round_to_nearest(x.to(device))
        under = quantizer.fake_quantize(x.to(device), scales.map(lambda s: s.to(device)))
        codes = quantizer.quantize(x.to(device), scales.map(lambda s: s.to(device)))
        alone = quantizer.find_qparams(x.to(device))
    assert_same_bits(found, expected)
    assert_same_bits(under, quantizer.fake_quantize(x, scales))
    assert_same_bits(codes, quantizer.quantize(x, scales))
    for qparams in (own, alone):
        for name in ("scale", "zero_point", "outer_scale"):
            assert_same_bits(getattr(qparams, name), getattr(scales, name))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_of_codes_have_the_same_bits(kernels: Kernels, quantizer: TensorQuantizer, dtype: torch.dtype) -> None:
    x = fitting(quantizer, values(torch.float32))
    scales = quantizer.round_to_nearest(x)[1]
    codes = quantizer.quantize(x, scales)
    quantizer.dequantize_to(codes, scales, expected := torch.empty(x.shape, dtype=dtype))
    with kernels.on() as device:
        under = scales.map(lambda s: s.to(device))
        quantizer.dequantize_to(codes.to(device), under, found := torch.empty(x.shape, dtype=dtype, device=device))
        strided = torch.zeros(*x.shape, 2, dtype=dtype, device=device)[..., 0]
        quantizer.dequantize_to(codes.to(device), under, strided)
        alone = quantizer.dequantize(codes.to(device), under)
    assert_same_bits(found, expected)
    assert_same_bits(strided, expected)
    assert_same_bits(alone, quantizer.dequantize(codes, scales))


def test_nan_and_inf_stay_as_visible_as_they_are_with_torch(kernels: Kernels, quantizer: TensorQuantizer) -> None:
    x = fitting(quantizer, with_broken_rows(torch.bfloat16))
    expected, scales = quantizer.round_to_nearest(x)
    with kernels.on() as device:
        found, own = quantizer.round_to_nearest(x.to(device))
    # What an infinite range has for a zero point is no number, which a cast to int32 makes any number of.
    if scales.zero_point is None or scales.zero_point.is_floating_point():
        assert_same_bits(found, expected)
    assert_same_bits(own.scale, scales.scale)
    assert bool((found.cpu().isfinite() <= expected.isfinite()).all())


def test_results_go_where_they_are_wanted_and_strides_do_not_matter(kernels: Kernels) -> None:
    quantizer = quantizer_for(integer(), activation=False)
    x = values(torch.bfloat16)
    expected, scales = quantizer.round_to_nearest(x)
    with kernels.on() as device:
        strided = torch.zeros(COLUMNS, ROWS, dtype=x.dtype, device=device).t().copy_(x)
        target = torch.zeros(ROWS, 2 * COLUMNS, dtype=x.dtype, device=device)[:, ::2]
        assert quantizer.round_to_nearest(strided, out=target)[0] is target
        assert_same_bits(target, expected)
        place = x.to(device, copy=True)
        assert quantizer.fake_quantize(place, scales.map(lambda s: s.to(device)), out=place) is place
        assert_same_bits(place, expected)
        three = x.to(device).reshape(2, 3, COLUMNS)
        assert_same_bits(quantizer.round_to_nearest(three)[0].reshape(x.shape), expected)


@pytest.mark.parametrize("spec", [integer(round_method=RoundType.floor), small_float(round_method=RoundType.round)], ids=str)
def test_other_roundings_are_left_to_torch(spec: QTensorConfig) -> None:
    assert quantizer_for(spec, activation=False).stored_level.format.device_code(spec) is None
