"""Shapes of small floats: their codes beside those of torch's own dtypes, and of the published tables."""

from __future__ import annotations

import pytest
import torch

from quark_schemes.arithmetic.float_shapes import E2M1, E2M3, E3M2, E4M3, E5M2, E5M3, FloatShape


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
