"""Small floats.

Codes that are looked up are those of the arithmetic, for every value that can make a difference.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quark_schemes.arithmetic.small_float import E2M1, E2M3, E3M2, E4M3, E5M2, E5M3, FloatShape, decode_small, encode_small, round_small_

SHAPES = {"e2m1": E2M1, "e2m3": E2M3, "e3m2": E3M2, "e4m3": E4M3, "e5m2": E5M2, "e5m3": E5M3}


def values() -> Tensor:
    """Every bfloat16 number as float32, and float32 numbers with each of these upper halves.

    They are those next to the bfloat16 number and around the middle.
    """
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    return (upper[:, None] | lower).view(torch.float32)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_codes_are_those_of_the_rounded_values(shape: FloatShape) -> None:
    x = values()
    x = x[~x.isnan()]
    rounded = round_small_(x.clone(), shape)
    rounded = rounded if shape.signed else rounded.abs()  # there is one zero
    codes = encode_small(x, shape, is_rounded=False)
    assert torch.equal(decode_small(codes, shape).view(torch.int32), rounded.view(torch.int32))
    assert torch.equal(encode_small(rounded, shape), codes)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_code_is_that_of_its_value(shape: FloatShape) -> None:
    codes = torch.arange(1 << shape.bits, dtype=torch.uint8)
    x = decode_small(codes, shape)
    is_number = x.isfinite()
    assert int((~is_number).sum()) == (1 + shape.signed) * len(shape.nan_codes + shape.infinite_codes)
    assert torch.equal(encode_small(x, shape)[is_number], codes[is_number])
    assert len(x[is_number].view(torch.int32).unique()) == int(is_number.sum())
    assert float(x[is_number].max()) == shape.largest
    assert float(x[x > 0].min()) == shape.smallest


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("is_rounded", [False, True])
def test_nan_gets_its_code_or_that_of_the_largest_value(shape: FloatShape, is_rounded: bool) -> None:
    nan = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    expected = shape.nan_codes[0] if shape.nan_codes else (1 << (shape.bits - 1)) - 1
    assert encode_small(nan, shape, is_rounded=is_rounded).tolist() == [expected] * 3


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_bfloat16_has_the_code_that_it_has_in_float32(shape: FloatShape) -> None:
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16)
    room = torch.empty(values.shape, dtype=torch.uint8)
    assert torch.equal(encode_small(values, shape, is_rounded=False, out=room), encode_small(values.float(), shape, is_rounded=False))
    assert torch.equal(room, encode_small(values, shape, is_rounded=False))


@pytest.mark.parametrize(("shape", "dtype"), [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)])
def test_codes_without_a_number_are_those_of_torch(shape: FloatShape, dtype: torch.dtype) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    positive = values[:128]
    assert tuple(positive.isnan().nonzero()[:, 0].tolist()) == shape.nan_codes
    assert tuple(positive.isinf().nonzero()[:, 0].tolist()) == shape.infinite_codes
    finite = positive[positive.isfinite()]
    assert float(finite.max()) == shape.largest
    assert float(finite[finite > 0].min()) == shape.smallest
    assert float(torch.tensor(shape.largest).frexp()[1]) - 1 == shape.largest_exponent


@pytest.mark.parametrize(
    ("shape", "bits", "largest", "smallest", "exponent"),
    [
        (E2M1, 4, 6.0, 0.5, 2),
        (E2M3, 6, 7.5, 0.125, 2),
        (E3M2, 6, 28.0, 0.0625, 4),
        (E4M3, 8, 448.0, 2.0**-9, 8),
        (E5M2, 8, 57344.0, 2.0**-16, 15),
        (E5M3, 8, 114688.0, 2.0**-17, 16),
    ],
)
def test_ranges_are_those_of_the_published_tables(shape: FloatShape, bits: int, largest: float, smallest: float, exponent: int) -> None:
    assert (shape.bits, shape.largest, shape.smallest, shape.largest_exponent) == (bits, largest, smallest, exponent)
    assert shape.to_own_exponents == 2.0 ** (shape.bias - 127)
