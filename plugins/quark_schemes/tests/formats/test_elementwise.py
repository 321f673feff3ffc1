"""Every code of every elementwise format.

Decoding and encoding are inverse, rounding goes by its rule, packing is exact.
"""

from typing import Any

import attrs
import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

import quark
from quark.config.tensor import QTensorConfig
from quark.numbers import NumberFormat, canonicalize, number_format
from quark_schemes.formats.floats import BFLOAT16, FLOAT16, CastFormat, MiniFloat
from quark_schemes.formats.integer import IntegerFormat

NAMES = quark.formats().names()
FLOATS = [n for n in NAMES if isinstance(number_format(n), MiniFloat)]
INTEGERS = [n for n in NAMES if isinstance(number_format(n), IntegerFormat)]
ELEMENTWISE = [*FLOATS, *INTEGERS]
ORACLES = {
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp4": ml_dtypes.float4_e2m1fn,
    "int4": ml_dtypes.int4,
    "uint4": ml_dtypes.uint4,
    "int2": ml_dtypes.int2,
    "uint2": ml_dtypes.uint2,
}


@pytest.mark.parametrize("name", [name for name in FLOATS if number_format(name).shape.signed])
def test_floats_have_no_zero_point_whether_a_spec_says_so_or_not(name: str) -> None:
    silent = QTensorConfig(dtype=name, qscheme="per_tensor", is_dynamic=False)
    assert [level.symmetric for level in canonicalize(silent)] == [True]
    assert canonicalize(silent) == canonicalize(silent.set(symmetric=True))
    assert "no zero point" in str(number_format(name).spec_error(silent.set(symmetric=False)))


def all_codes(fmt: NumberFormat) -> Tensor:
    """Every code, in the format's storage dtype; of 32 bits those of 16 about 0."""
    if isinstance(fmt, IntegerFormat):
        return torch.arange(max(fmt.low, -(1 << 15)), min(fmt.high, 1 << 16) + 1).to(fmt.storage_dtype)
    return torch.arange(1 << int(fmt.bits), dtype=torch.uint8).view(fmt.storage_dtype)


def all_values(fmt: NumberFormat) -> Tensor:
    """Every finite value, ascending, without −0."""
    values = fmt.decode(all_codes(fmt))
    return values[values.isfinite()].unique()


def by_definition(fmt: MiniFloat) -> Tensor:
    """The values of a small float from sign, exponent and mantissa."""
    found = {0.0}
    shape = fmt.shape
    for exponent in range(1 << shape.exponent_bits):
        for mantissa in range(1 << shape.mantissa_bits):
            fraction = mantissa / (1 << shape.mantissa_bits)
            value = fraction * 2.0 ** (1 - shape.bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - shape.bias)
            if value <= shape.largest:
                found |= {value, -value} if shape.signed else {value}
    return torch.tensor(sorted(found))


@pytest.mark.parametrize("name", FLOATS)
def test_decoding_gives_the_values_of_the_definition(name: str) -> None:
    fmt = number_format(name)
    assert isinstance(fmt, MiniFloat)
    assert torch.equal(all_values(fmt), by_definition(fmt))


@pytest.mark.parametrize("name", ORACLES)
def test_every_code_means_what_an_independent_library_says(name: str) -> None:
    fmt = number_format(name)
    codes = all_codes(fmt)
    theirs = torch.from_numpy(codes.view(torch.uint8).numpy().view(ORACLES[name]).astype(np.float32))
    assert torch.equal(fmt.decode(codes).nan_to_num(nan=12345.0), theirs.nan_to_num(nan=12345.0))


@pytest.mark.parametrize("name", [n for n in ORACLES if n in FLOATS])
def test_rounding_agrees_with_an_independent_library(name: str) -> None:
    fmt = number_format(name)
    assert isinstance(fmt, MiniFloat)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(20000, generator=g) * 2.0 ** torch.randint(-12, 10, (20000,), generator=g)
    x = x.clamp(-fmt.shape.largest, fmt.shape.largest)
    theirs = torch.from_numpy(x.numpy().astype(ORACLES[name]).astype(np.float32))
    assert torch.equal(fmt.round_(x.clone()), theirs)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_code_decodes_and_is_encoded_again(name: str) -> None:
    fmt = number_format(name)
    codes = all_codes(fmt)
    values = fmt.decode(codes)
    usable = values.isfinite()
    if isinstance(fmt, MiniFloat) and not fmt.shape.nan_codes:
        assert usable.all(), "a format without NaN uses every code"
    again = fmt.encode(values[usable].clone())
    assert again.dtype == fmt.storage_dtype
    assert torch.equal(again.view(torch.uint8), codes[usable].view(torch.uint8))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_between_two_values_the_nearest_wins_and_halfway_the_even_one(name: str) -> None:
    fmt = number_format(name)
    low, high, middle, below, above = neighbours(fmt)
    inner = middle != 0
    assert torch.equal(fmt.round_(below.clone())[inner], low[inner])
    assert torch.equal(fmt.round_(above.clone())[inner], high[inner])
    odd_low, odd_high = (fmt.encode(v.clone()).view(torch.uint8)[:: fmt.storage_dtype.itemsize] & 1 for v in (low, high))
    assert ((odd_low ^ odd_high) == 1).all(), "neighbours have codes of different parity"
    assert torch.equal(fmt.round_(middle.clone()), torch.where(odd_low == 0, low, high))


def neighbours(fmt: NumberFormat) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Each two neighbouring values, the midpoint between them, and its neighbours below and above."""
    values = all_values(fmt)
    low, high = values[:-1], values[1:]
    middle = (low + high) / 2  # exact: neighbours differ by a power of two
    just = torch.finfo(torch.float32).eps * 4
    return low, high, middle, middle - middle.abs() * just, middle + middle.abs() * just


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "fp8_e5m3"])
def test_nan_has_a_code_where_the_format_has_one(name: str) -> None:
    fmt = number_format(name)
    assert fmt.decode(fmt.encode(torch.tensor([torch.nan, 1.0]))).isnan().tolist() == [True, False]
    assert fmt.decode(fmt.codes(torch.tensor([torch.nan, 1.0]))).isnan().tolist() == [True, False]


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_keeps_the_sign_of_zero_and_rounds_as_torch_does(name: str) -> None:
    fmt = number_format(name)
    assert isinstance(fmt, MiniFloat)
    g = torch.Generator().manual_seed(0)
    x = torch.cat([torch.randn(5000, generator=g) * 2.0 ** torch.randint(-20, 8, (5000,), generator=g), torch.tensor([-0.0, -1e-9, 0.0])])
    x = x.clamp(-fmt.shape.largest, fmt.shape.largest)
    ours, theirs = fmt.round_(x.clone()), x.to(fmt.storage_dtype).float()
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
    assert torch.equal(fmt.encode(ours).view(torch.uint8), x.to(fmt.storage_dtype).view(torch.uint8))


@pytest.mark.parametrize("name", ["fp4", "fp6_e3m2", "fp6_e2m3"])
def test_narrower_floats_forget_the_sign_of_zero_when_rounding_and_keep_it_in_codes(name: str) -> None:
    fmt = number_format(name)
    assert not fmt.round_(torch.tensor([-0.0, -1e-9])).signbit().any()
    assert fmt.encode(torch.tensor([-0.0, 0.0])).tolist() == [1 << (int(fmt.bits) - 1), 0]


@pytest.mark.parametrize("name", INTEGERS)
def test_a_symmetric_unsigned_format_has_zero_point_0_as_documented(name: str) -> None:
    fmt = number_format(name)
    qparams = fmt.qparams(torch.tensor(-1.0), torch.tensor(3.0), spec(name))
    assert qparams.zero_point is None
    asymmetric = fmt.qparams(torch.tensor(-1.0), torch.tensor(3.0), attrs.evolve(spec(name), symmetric=False))
    assert asymmetric.zero_point is not None
    assert asymmetric.zero_point.dtype == torch.int32


def test_e8m0_holds_every_power_of_two_and_rounds_up() -> None:
    fmt = number_format("e8m0")
    codes = torch.arange(255, dtype=torch.uint8)
    values = fmt.decode(codes)
    assert torch.equal(values.double(), 2.0 ** (torch.arange(255).double() - 127))
    assert torch.equal(fmt.encode(values), codes)
    between = values[1:-1] * 1.25
    assert torch.equal(fmt.round_(between.clone()), values[2:])
    # The smallest is no normal number of float32, and processors may flush those: it is never chosen.
    assert torch.equal(fmt.round_(values[1:].clone()), values[1:])
    assert fmt.decode(fmt.encode(torch.tensor([torch.nan]))).isnan().all()


@pytest.mark.parametrize("name", ["fp8_e5m3", "fp8_e8m0"])
def test_formats_of_scales_are_refused_for_weights(name: str) -> None:
    from quark.numbers import quantizer_for

    quantizer = quantizer_for(spec(name), activation=False)
    assert "holds only scales" in str(quantizer.shape_error((4, 4)))


@pytest.mark.parametrize("shape", [(1,), (1, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("name", [n for n in ELEMENTWISE if n != "fp8_e5m3"])
def test_a_single_element_is_a_tensor_like_any_other(name: str, shape: tuple[int, ...]) -> None:
    from quark.numbers import quantizer_for

    quantizer = quantizer_for(spec(name), activation=False)
    x = torch.full(shape, 0.7)
    values, qparams = quantizer.round_to_nearest(x)
    # It is the end of its own range, so within half a step of it: an integer's step is the range ÷ its reach.
    step = 0.7 / quantizer.format.max_magnitude(spec(name)) if name in INTEGERS else 0.0  # type: ignore[attr-defined]
    assert (values.shape, qparams.scale.shape) == (shape, ())
    assert abs(float(values) - 0.7) <= step / 2 + 1e-6
    assert torch.equal(quantizer.dequantize(quantizer.quantize(x, qparams), qparams), values)


def spec(name: str, **more: Any) -> QTensorConfig:
    return QTensorConfig(dtype=name, qscheme="per_tensor", symmetric=True, is_dynamic=False, **more)


@pytest.mark.parametrize(("format_", "dtype"), [(FLOAT16, torch.float32), (FLOAT16, torch.bfloat16), (BFLOAT16, torch.float32)])
def test_a_cast_ends_at_the_largest_finite_value(format_: CastFormat, dtype: torch.dtype) -> None:
    largest = torch.finfo(format_.storage_dtype).max
    x = torch.tensor([3e38, -3e38, 3.38e38, 1.0, -2.5], dtype=dtype)
    expected = x.double().clamp(-largest, largest).to(format_.storage_dtype)
    assert torch.equal(format_.encode(x.clone()), expected)
    assert torch.equal(format_.round_(x.clone()).double(), expected.to(dtype).double())
    assert torch.isfinite(format_.encode(x)).all()
    broken = torch.tensor([torch.inf, -torch.inf], dtype=dtype)
    assert torch.equal(format_.encode(broken), broken.to(format_.storage_dtype))
