"""Histograms: every value is counted in its bin, merging is exact, quantiles are torch's within a bin.

The percentile observer.
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quark.config.tensor import QTensorConfig
from quark.errors import CalibrationError
from quark.numbers import TILE_ELEMENTS, quantizer_for
from quark_schemes.observers.histogram import BINS, Distribution, Histogram

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
VALUES = st.lists(FLOATS, min_size=1, max_size=30).map(lambda v: torch.tensor(v, dtype=torch.float32))


def seen(*tensors: Tensor) -> Histogram:
    histogram = Histogram()
    for x in tensors:
        histogram.observe(x)
    return histogram


def same(a: Distribution, b: Distribution) -> bool:
    tensors = all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("left", "right", "counts"))
    return tensors and (a.low, a.high) == (b.low, b.high)


def widest_bin(x: Tensor) -> float:
    return float(x.abs().max()) / (BINS / 2)


@given(VALUES)
def test_every_value_lies_in_the_bin_that_counts_it(x: Tensor) -> None:
    found = seen(x).distribution()
    ordered = x.double().sort().values
    assert int(found.counts.sum()) == len(x)
    assert (found.left.repeat_interleave(found.counts) <= ordered).all()
    assert (ordered <= found.right.repeat_interleave(found.counts)).all()
    assert (found.low, found.high) == (float(x.min()), float(x.max()))
    smallest = 2.0**-100 / BINS  # the width of bins of values too small for any other
    assert float((found.right - found.left).max()) <= max(widest_bin(x), smallest)


@given(VALUES, VALUES, st.booleans())
def test_merging_equals_having_seen_both(a: Tensor, b: Tensor, magnitudes: bool) -> None:
    merged = seen(a)
    merged.merge(seen(b))
    both, swapped = (seen(*pair).distribution(magnitudes=magnitudes) for pair in ((a, b), (b, a)))
    together = seen(torch.cat([a, b])).distribution(magnitudes=magnitudes)
    for other in (both, swapped, together):
        assert same(merged.distribution(magnitudes=magnitudes), other)


def test_merging_with_an_empty_histogram_changes_nothing() -> None:
    x = torch.tensor([-3.0, 0.0, 5.0])
    full, empty = seen(x), Histogram()
    full.merge(Histogram())
    empty.merge(seen(x))
    assert same(full.distribution(), seen(x).distribution())
    assert same(empty.distribution(), seen(x).distribution())


def test_the_largest_floats_are_counted() -> None:
    largest = torch.finfo(torch.float32).max
    assert seen(torch.tensor([largest, largest])).distribution().counts.tolist() == [2]
    assert seen(torch.tensor([largest, 1.0, -largest])).distribution().counts.tolist() == [1, 1, 1]


def test_zeros_have_a_bin_of_their_own() -> None:
    found = seen(torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1.0])).distribution()
    assert found.counts.tolist() == [1, 2, 1, 1]
    assert (float(found.left[1]), float(found.right[1])) == (0.0, 0.0)


def test_large_tensors_are_counted_in_tiles() -> None:
    x = torch.linspace(-3, 7, 2 * TILE_ELEMENTS + 17)
    assert same(seen(x).distribution(), seen(*x.split(1000)).distribution())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_values_count_as_the_floats_they_are(dtype: torch.dtype) -> None:
    x = torch.linspace(-3, 7, 999).reshape(3, 9, 37).to(dtype)
    assert same(seen(x).distribution(), seen(x.float()).distribution())
    assert same(seen(x.transpose(0, 2)).distribution(), seen(x).distribution())


@given(VALUES, st.floats(0, 1))
def test_quantiles_are_those_of_torch_within_a_bin(x: Tensor, fraction: float) -> None:
    found = seen(x).distribution()
    tolerance = max(widest_bin(x), 2.0**-100) * (1 + 1e-6)
    assert abs(found.quantile(fraction) - float(torch.quantile(x.double(), fraction))) <= tolerance
    magnitudes = seen(x).distribution(magnitudes=True)
    assert abs(magnitudes.quantile(fraction) - float(torch.quantile(x.double().abs(), fraction))) <= tolerance


def percentile_range(x: Tensor, symmetric: bool, **options: Any) -> tuple[float, float]:
    spec = QTensorConfig(
        dtype="int8",
        observer_cls="PerTensorPercentileObserver",
        is_dynamic=False,
        qscheme="per_tensor",
        symmetric=symmetric,
        observer_options=options,
    )
    observer = quantizer_for(spec, activation=True).observer()
    observer.observe(x)
    low, high = observer.range()
    assert (low.dtype, low.shape, high.shape) == (torch.float32, (), ())
    return float(low), float(high)


@pytest.mark.parametrize("percentile", [50, 90, 99.0, 99.9, 100])
def test_percentile_ranges_are_percentiles_of_values_or_of_magnitudes(percentile: float) -> None:
    x = torch.cat([torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 3 + 1, torch.zeros(2000), torch.tensor([50.0, -80.0])])
    low, high = percentile_range(x, symmetric=False, percentile=percentile)
    assert abs(low - np.percentile(x.numpy(), 100 - percentile)) <= widest_bin(x)
    assert abs(high - np.percentile(x.numpy(), percentile)) <= widest_bin(x)
    low, high = percentile_range(x, symmetric=True, percentile=percentile)
    assert abs(high - np.percentile(x.abs().numpy(), percentile)) <= widest_bin(x)
    assert low == -high


def test_without_an_option_the_range_is_next_to_all_that_was_seen() -> None:
    x = torch.cat([torch.linspace(-0.5, 0.5, 1000), torch.tensor([-3.0, 50.0])])
    low, high = percentile_range(x, symmetric=False)
    assert (low, high) == pytest.approx((-3.0, 50.0), rel=1e-4)
    assert low >= -3.0
    assert high <= 50.0
    assert percentile_range(x, symmetric=True) == (-high, high)


def test_zeros_count_like_any_value() -> None:
    assert percentile_range(torch.tensor([0.0] * 99 + [7.0]), symmetric=True, percentile=90) == (0.0, 0.0)
    assert percentile_range(torch.zeros(5), symmetric=False) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("symmetric", "options", "part"),
    [
        (True, {"percentile": 0}, "above 0"),
        (True, {"percentile": 100.5}, "up to 100"),
        (True, {"percentile": "99"}, "give a number"),
        (True, {"percentile": True}, "give a number"),
        (True, {"percentile": float("nan")}, "give a number"),
        (False, {"percentile": 30}, "50 to 100"),
        (True, {"percent": 99}, "its options are percentile"),
    ],
)
def test_a_percentile_that_means_nothing_is_refused_with_the_cure(symmetric: bool, options: dict[str, Any], part: str) -> None:
    observer = "PerTensorPercentileObserver"
    spec = QTensorConfig(
        dtype="int8", observer_cls=observer, is_dynamic=False, qscheme="per_tensor", symmetric=symmetric, observer_options=options
    )
    assert part in (quantizer_for(spec, activation=True).shape_error((4,)) or "")


def test_nothing_seen_is_an_error() -> None:
    with pytest.raises(CalibrationError, match="has seen no data"):
        percentile_range(torch.empty(0, 5), symmetric=True)
