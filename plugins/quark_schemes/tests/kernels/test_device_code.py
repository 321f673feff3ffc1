"""Kernels give the bits of torch's operations on CPUs.

Values, codes, scales and zero points, for every scheme and kind of scale.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quark.config.enums import RoundType
from quark.config.tensor import QTensorConfig
from quark.numbers import TensorQuantizer, quantizer_for
from tests.kit.interpreted_kernels import Kernels, assert_same_bits
from tests.kit.kernel_specs import CASES, integer

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


@pytest.mark.parametrize("spec", [integer(round_method=RoundType.floor), integer(round_method=RoundType.round)], ids=str)
def test_other_roundings_are_left_to_torch(spec: QTensorConfig) -> None:
    assert quantizer_for(spec, activation=False).stored_level.format.device_code(spec) is None
