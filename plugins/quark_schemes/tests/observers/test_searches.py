"""The ranges that observers search for are the best by their own definition, by brute force."""

import math
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from quark.config.enums import ZeroPointType
from quark.config.tensor import QTensorConfig
from quark.numbers import QParams, quantizer_for
from quark.numbers.single_level import SingleLevelQuantizer
from quark_schemes.observers.histogram import BINS, Distribution, Histogram
from quark_schemes.observers.histogram_ranges import CLIPPED_SHARES, ExpectedError, _least
from quark_schemes.observers.mse import ROW_FACTORS, TENSOR_FACTORS

from .quantizers import heavy_tailed, quantizer_of, seen, spec_of


def bell(count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(0)) + 0.3


def root_error(x: Tensor, low: Tensor, high: Tensor, spec: QTensorConfig) -> float:
    """Root mean squared error of quantizing with that range."""
    quantizer = quantizer_for(spec, activation=False)
    assert isinstance(quantizer, SingleLevelQuantizer)
    qparams = quantizer.format.qparams(low, high, spec)
    return float((quantizer.fake_quantize(x, qparams) - x).double().square().mean().sqrt())


def shrunk(x: Tensor, factors: tuple[float, ...], symmetric: bool) -> Iterator[tuple[Tensor, Tensor]]:
    low, high = x.min().clamp(max=0), x.max().clamp(min=0)
    if symmetric:
        high = torch.maximum(-low, high)
        low = -high
    return ((low * f, high * f) for f in factors)


@pytest.mark.parametrize(
    ("dtype", "symmetric"), [("int4", True), ("uint4", False), ("int8", True), ("uint8", False), ("fp8_e4m3", True), ("fp8_e5m2", True)]
)
def test_mse_finds_the_best_range_of_its_grid(dtype: str, symmetric: bool) -> None:
    # The distance to the nearest value of a format changes no faster than the value: centres err by half a
    # bin each, for both ranges.
    x = heavy_tailed(64)
    spec = spec_of("PerTensorMSEObserver", dtype, symmetric)
    low, high = seen("PerTensorMSEObserver", x, dtype=dtype, symmetric=symmetric).range()
    best = min(root_error(x, *candidate, spec) for candidate in shrunk(x, TENSOR_FACTORS, symmetric))
    assert root_error(x, low, high, spec) <= best + float(x.abs().max()) / (BINS / 2)


def test_mse_clips_few_bits_hard_and_floats_hardly() -> None:
    x = heavy_tailed(64)
    amax = float(x.abs().max())
    high = {dtype: float(seen("PerTensorMSEObserver", x, dtype=dtype).range()[1]) for dtype in ("int4", "int8", "fp8_e4m3")}
    assert high["int4"] < 0.5 * amax < high["int8"]
    assert high["fp8_e4m3"] > 0.9 * amax


def test_asymmetric_mse_shrinks_each_end_by_itself() -> None:
    x = torch.cat([torch.linspace(-1, 3, 40000), torch.tensor([-50.0])])
    spec = spec_of("PerTensorMSEObserver", "uint4", symmetric=False)
    low, high = seen("PerTensorMSEObserver", x, dtype="uint4", symmetric=False).range()
    assert low > -10
    assert high > 2.5
    joint = min(root_error(x, *candidate, spec) for candidate in shrunk(x, TENSOR_FACTORS, symmetric=False))
    assert root_error(x, low, high, spec) < joint


@pytest.mark.parametrize("name", ["PerTensorMSEObserver", "PerTensorHistogramObserver", "PerTensorHistogramObserverPro"])
def test_ranges_with_real_zero_points_leave_out_zero(name: str) -> None:
    x = torch.cat([torch.linspace(90, 92, 30000), torch.tensor([80.0])])
    low, high = seen(name, x, dtype="uint4", symmetric=False, zero_point_type=ZeroPointType.float32).range()
    assert float(low) > 88
    assert float(high) == pytest.approx(92, abs=0.2)


@pytest.mark.parametrize(("name", "dtype", "symmetric"), [("Channel", "int4", True), ("Group", "int4", True), ("Group", "uint4", False)])
def test_mse_of_rows_is_the_least_of_each_row(name: str, dtype: str, symmetric: bool) -> None:
    x = heavy_tailed(3)
    observer = f"Per{name}MSEObserver"
    quantizer = quantizer_of(observer, dtype, symmetric)
    y, qparams = quantizer.round_to_nearest(x)
    spec = spec_of("PerTensorMSEObserver", dtype, symmetric)
    rows, found = quantizer.granularity.rows(x), quantizer.granularity.rows(y)  # type: ignore[attr-defined]
    assert qparams.scale.numel() == len(rows)
    for row, result in zip(rows, found, strict=True):
        best = min(root_error(row, *candidate, spec) for candidate in shrunk(row, ROW_FACTORS, symmetric))
        error = float((result - row).double().square().mean().sqrt())
        assert error == pytest.approx(best) if symmetric else error <= best * (1 + 1e-6)


def distribution(x: Tensor, magnitudes: bool = False) -> Distribution:
    histogram = Histogram()
    histogram.observe(x)
    return histogram.distribution(magnitudes=magnitudes)


def narrowest(bins: Distribution, kept: int) -> tuple[float, float]:
    """By definition: of all stretches of bins that hold as many values, the shortest."""
    until = bins.counts.cumsum(0)
    held = until - (until - bins.counts).unsqueeze(1)
    width = torch.where(held >= kept, bins.right - bins.left.unsqueeze(1), torch.inf)
    start, end = divmod(int(width.argmin()), len(until))
    return float(bins.left[start]), float(bins.right[end])


@pytest.mark.parametrize("dtype", ["int2", "uint4", "fp4"])
def test_histogram_takes_the_best_of_the_narrowest_ranges(dtype: str) -> None:
    x = bell(300)
    symmetric = dtype != "uint4"
    spec = attrs.evolve(spec_of("PerTensorHistogramObserver", dtype, symmetric), scale_type="float32")
    bins, centres = distribution(x, magnitudes=symmetric), distribution(x)
    values = centres.centres.float().repeat_interleave(centres.counts)
    candidates = []
    for share in CLIPPED_SHARES:
        kept = x.numel() - math.floor(share * x.numel())
        low, high = (0.0, float(bins.right[int(bins.counts.cumsum(0).ge(kept).nonzero()[0])])) if symmetric else narrowest(bins, kept)
        candidates.append((torch.tensor(-high if symmetric else low), torch.tensor(high)))
    best = min(candidates, key=lambda c: root_error(values, *c, spec))
    observer = quantizer_for(spec, activation=False).observer()
    observer.observe(x)
    assert [float(v) for v in observer.range()] == pytest.approx([float(v) for v in best])
    assert dtype == "fp4" or float(best[1]) < float(x.max())


def expected_cost(bins: Distribution, low: float, high: float, step: float) -> float:
    """By definition.

    What is clipped costs the square of its way, what is kept a twelfth of the squared step, zeros nothing.
    """
    cost = 0.0
    for value, count in zip(bins.centres.tolist(), bins.counts.tolist(), strict=True):
        way = max(low - value, value - high, 0.0)
        cost += count * (way**2 if way else step**2 / 12 if value else 0.0)
    return cost


@pytest.mark.parametrize("symmetric", [True, False])
def test_histogram_pro_weighs_all_pairs_of_bins(symmetric: bool) -> None:
    x = torch.cat([bell(150), torch.zeros(30)])
    bins = distribution(x, magnitudes=symmetric)
    starts = [0.0] if symmetric else [v for v in bins.left.tolist() if v <= 0]
    steps = 1.5 if symmetric else 3
    costs = {(a, b): expected_cost(bins, a, b, (b - a) / steps) for a in starts for b in bins.right.tolist() if b >= 0}
    low, high = (float(v) for v in seen("PerTensorHistogramObserverPro", x, dtype="int2", symmetric=symmetric).range())
    best = min(costs, key=lambda pair: costs[pair])
    assert (low, high) == pytest.approx((-best[1], best[1]) if symmetric else best)
    assert high - low < float(x.max() - x.min())


def test_two_rounds_of_pairs_find_what_all_pairs_hold() -> None:
    bins = distribution(bell(20000))
    starts, ends = bins.left[bins.left < 0], bins.right[bins.right > 0].flip(0)
    assert min(len(starts), len(ends)) > 1000
    cost = ExpectedError(bins, 15)
    found = cost(*(edge.reshape(1) for edge in _least(cost, starts, ends)))
    assert float(found) == pytest.approx(float(cost(starts, ends).min()), rel=1e-12)


def test_histogram_pro_serves_integers_alone() -> None:
    problem = quantizer_of("PerTensorHistogramObserverPro", "fp8_e4m3").shape_error((4,))
    assert problem is not None
    assert "use PerTensorHistogramObserver" in problem


POWERS = ["PerTensorPowOf2MinMax", "PerTensorPowOf2MinMSE", "PerChannelPowOf2MinMax", "PerChannelPowOf2MinMSE"]


@pytest.mark.parametrize("scale_type", ["float32", "pof2"])
@pytest.mark.parametrize("dtype", ["int4", "uint4", "int8", "uint8", "int16"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", POWERS)
@pytest.mark.parametrize("magnitude", [1e-12, 1e-3, 1.0, 1e6])
def test_scales_are_powers_of_two(name: str, symmetric: bool, dtype: str, scale_type: str, magnitude: float) -> None:
    quantizer = quantizer_of(f"{name}Observer", dtype, symmetric, scale_type=scale_type)
    qparams = quantizer.find_qparams(heavy_tailed() * magnitude)
    assert (torch.frexp(qparams.scale).mantissa == 0.5).all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", ["PerTensor", "PerChannel"])
def test_power_of_two_min_max_is_nearest_to_min_max_and_keeps_its_zero_point(granularity: str, symmetric: bool) -> None:
    x = heavy_tailed()
    powers = quantizer_of(f"{granularity}PowOf2MinMaxObserver", "int8", symmetric).find_qparams(x)
    plain = quantizer_of(f"{granularity}MinMaxObserver", "int8", symmetric).find_qparams(x)
    assert ((powers.scale / plain.scale).log2().abs() <= 0.5).all()
    assert symmetric or torch.equal(_zero(powers), _zero(plain))


def _zero(qparams: QParams) -> Tensor:
    assert qparams.zero_point is not None
    return qparams.zero_point


@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_power_of_two_min_mse_is_the_best_of_five(dtype: str) -> None:
    x = heavy_tailed()
    spec = spec_of("PerTensorPowOf2MinMSEObserver", dtype)
    nearest = seen("PerTensorPowOf2MinMaxObserver", x, dtype=dtype).range()[1]
    errors = [root_error(x, -nearest * f, nearest * f, spec) for f in (4, 2, 1, 0.5, 0.25)]
    low, high = seen("PerTensorPowOf2MinMSEObserver", x, dtype=dtype).range()
    assert root_error(x, low, high, spec) <= min(errors) + float(x.abs().max()) / (BINS / 2)
    assert root_error(x, low, high, spec) < errors[2] or errors[2] == min(errors)
    rows = seen("PerChannelPowOf2MinMSEObserver", x, dtype=dtype).range()[1]
    tensor = spec_of("PerTensorMinMaxObserver", dtype)
    tops = seen("PerChannelPowOf2MinMaxObserver", x, dtype=dtype).range()[1]
    for row, high, top in zip(x, rows, tops, strict=True):
        assert root_error(row, -high, high, tensor) == pytest.approx(
            min(root_error(row, -top * f, top * f, tensor) for f in (4, 2, 1, 0.5, 0.25))
        )


def test_of_ranges_as_good_as_each_other_the_widest_is_taken() -> None:
    # 64 is a whole number of steps of ½, 1 and 2; the nearest power of two to 64 ÷ 127.5 is ½.
    assert quantizer_of("PerTensorPowOf2MinMSEObserver").find_qparams(torch.tensor([64.0])).scale == 2
    assert quantizer_of("PerChannelPowOf2MinMSEObserver").find_qparams(torch.tensor([[64.0]])).scale == 2


def test_power_of_two_min_mse_reaches_a_quarter_of_min_max() -> None:
    x = torch.cat([bell(3000), torch.tensor([16.0])])
    nearest, best = (quantizer_of(f"PerTensorPowOf2{name}Observer", "int4").find_qparams(x).scale for name in ("MinMax", "MinMSE"))
    assert (float(nearest), float(best)) == (2.0, 0.5)


@pytest.mark.parametrize("more", [{"zero_point_type": ZeroPointType.float32, "symmetric": False}])
@pytest.mark.parametrize("name", POWERS)
def test_powers_of_two_need_whole_zero_points(name: str, more: dict[str, Any]) -> None:
    problem = quantizer_of(f"{name}Observer", **more).shape_error((8, 8))
    assert problem is not None
    assert "zero_point_type=ZeroPointType.int32" in problem
