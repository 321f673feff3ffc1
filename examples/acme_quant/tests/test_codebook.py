"""acme_nf3 and AcmeRmsObserver give these numbers, which the conformance suite does not check."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch

import acme_quant.plugin
from acme_quant.codebook import ACME_NF3, BOUNDS, VALUES, nearest_boundaries, pack_three
from acme_quant.observer import DEFAULT_MULTIPLE, AcmeRmsObserver
from acme_quant.schemes import acme_nf3_g64
from quark.config.tensor import QTensorConfig
from quark.numbers import PerGroup, quantizer_for
from quark.plugins import Catalog, Source, using
from quark.plugins.discovery import discover

SPEC = acme_nf3_g64().weight
assert isinstance(SPEC, QTensorConfig)
WITH_ACME = Catalog(candidate for candidate in discover() if candidate.source.distribution != "acme-quant")
WITH_ACME.add(acme_quant.plugin, Source("acme-quant"))
with using(WITH_ACME):
    QUANTIZER = quantizer_for(SPEC, activation=False)


def normal_weights(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def observed(*tensors: torch.Tensor, spec: QTensorConfig = SPEC) -> AcmeRmsObserver:
    observer = AcmeRmsObserver(spec, PerGroup(64))
    for tensor in tensors:
        observer.observe(tensor)
    return observer


def test_the_codebook_rises_from_minus_one_to_one_and_holds_zero() -> None:
    assert VALUES.shape == (8,)
    assert (VALUES[0], VALUES[3], VALUES[-1]) == (-1, 0, 1)
    assert (VALUES.diff() > 0).all()


def test_values_on_either_side_of_zero_are_equally_spaced_in_probability() -> None:
    reach = NormalDist().inv_cdf(1 - (1 / 8 + 1 / 7) / 4)
    probability = [NormalDist().cdf(reach * float(v)) for v in VALUES]
    below, above = (torch.tensor(p, dtype=torch.float64).diff() for p in (probability[:4], probability[3:]))
    # A value is off by at most 2^-25, half a unit in the last place below 1; the density times reach is at
    # most 0.6.
    assert (below - below.mean()).abs().max() < 2**-24
    assert (above - above.mean()).abs().max() < 2**-24
    assert above.mean() * 4 == pytest.approx(below.mean() * 3, abs=2**-23)


def test_bounds_divide_float32_numbers_exactly() -> None:
    after = torch.nextafter(BOUNDS, torch.tensor(torch.inf))
    at, past = ((x.double()[:, None] - VALUES.double()).abs() for x in (BOUNDS, after))
    codes = torch.arange(7)
    assert (at[codes, codes] <= at[codes, codes + 1]).all()
    assert (past[codes, codes + 1] <= past[codes, codes]).all()


def test_a_number_halfway_between_two_values_goes_to_the_even_code() -> None:
    values = torch.tensor([-1.0, -0.5, 0.0, 1.0])
    halfway = (values[1:] + values[:-1]) / 2
    assert torch.bucketize(halfway, nearest_boundaries(values)).tolist() == [0, 2, 2]
    assert torch.bucketize(halfway + 2**-20, nearest_boundaries(values)).tolist() == [1, 2, 3]
    assert torch.bucketize(halfway - 2**-20, nearest_boundaries(values)).tolist() == [0, 1, 2]


@pytest.mark.parametrize("exponent", [-120, 120])
def test_tensors_of_any_magnitude_get_the_same_codes(exponent: int) -> None:
    x = normal_weights(4, 64)
    scaled = x * 2.0**exponent  # a power of two changes no digit, but a square of it would be beyond float32
    codes, expected = (QUANTIZER.quantize(t, QUANTIZER.find_qparams(t)) for t in (scaled, x))
    assert torch.equal(codes, expected)


def test_normal_weights_lose_hardly_more_than_under_the_best_eight_levels() -> None:
    x = normal_weights(4096, 64)
    error = float((QUANTIZER.fake_quantize(x) - x).square().mean())
    # 0.03454 is the least mean squared error of eight levels for a normal variable (Max, 1960); uniform
    # levels have 0.03744 at best.
    assert 0.9 * 0.03454 < error < 0.03744


def test_eight_codes_lie_in_three_bytes_little_endian() -> None:
    packed = pack_three(torch.tensor([[1, 0, 0, 0, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7]], dtype=torch.uint8))
    word = sum(code << (3 * code) for code in range(8))
    assert packed.tolist() == [[1, 0, 0], list(word.to_bytes(3, "little"))]


def test_the_range_is_a_multiple_of_the_root_mean_square_clipped_by_the_largest_magnitude() -> None:
    flat, peak = torch.full((64,), 0.5), torch.full((64,), 0.01)
    peak[5] = -100
    low, high = observed(torch.cat([flat, peak])[None]).range()
    rms = math.sqrt((63 * 0.01**2 + 100**2) / 64)
    assert torch.equal(low, -high)
    assert high.tolist()[0] == pytest.approx([0.5, DEFAULT_MULTIPLE * rms], rel=2**-22)
    wide = SPEC.set(observer_options={"multiple": 1.25})
    assert float(observed(peak[None], spec=wide).range()[1]) == pytest.approx(1.25 * rms, rel=2**-22)


def test_observers_that_merge_have_seen_both() -> None:
    first, second = normal_weights(8, 128).split(4)
    merged = observed(first)
    merged.merge(observed(second))
    merged.merge(observed())
    for found, expected in zip(merged.range(), observed(first, second).range(), strict=True):
        assert torch.equal(found, expected)
    both = torch.stack([first.reshape(-1, 64), second.reshape(-1, 64)], dim=1).reshape(-1, 128).double()
    expected = torch.minimum(DEFAULT_MULTIPLE * both.square().mean(1).sqrt(), both.abs().amax(1)).float()
    torch.testing.assert_close(merged.range()[1].flatten(), expected, rtol=2**-22, atol=0)


BAD: dict[str, tuple[dict[str, object], str]] = {
    "a zero point": ({"symmetric": False}, "no zero point"),
    "small scales": ({"scale_format": "e4m3"}, "float32"),
    "no granularity": ({"qscheme": None}, "needs qscheme"),
    "another rounding": ({"round_method": "floor"}, "nearest"),
    "a negative multiple": ({"observer_options": {"multiple": -1.0}}, "positive finite"),
    "a stranger's option": ({"observer_options": {"percentile": 99}}, "no option 'percentile'"),
}


@pytest.mark.parametrize(("changes", "words"), BAD.values(), ids=BAD)
def test_specs_that_cannot_be_served_are_refused_before_any_work(changes: dict[str, object], words: str) -> None:
    spec = SPEC.set(**changes)
    problem = ACME_NF3.spec_error(spec) or AcmeRmsObserver.spec_error(spec)
    assert problem is not None
    assert words in problem
    assert ACME_NF3.spec_error(SPEC) is AcmeRmsObserver.spec_error(SPEC) is None
