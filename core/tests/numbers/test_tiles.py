"""Another use, thread or mode does not disturb scratch memory; casts of rounded values stay finite."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import quark
from quark.numbers import WeightGrid, cast_finite, quantizer_for
from quark.numbers.tiles import keep_finite_, scratch

CPU = torch.device("cpu")


def test_memory_is_used_again_for_the_same_use_and_no_other() -> None:
    one = scratch((4, 8), torch.float32, CPU, "one").fill_(1)
    other = scratch((4, 8), torch.float32, CPU, "other").fill_(2)
    assert bool((one == 1).all())
    again = scratch((2, 8), torch.int16, CPU, "one")
    assert again.data_ptr() == one.data_ptr() != other.data_ptr()
    assert (again.shape, again.dtype) == ((2, 8), torch.int16)


def test_threads_have_memory_of_their_own() -> None:
    here = scratch((64,), torch.float32, CPU, "one")
    with ThreadPoolExecutor(1) as executor:
        there = executor.submit(scratch, (64,), torch.float32, CPU, "one").result()
        assert there.data_ptr() != here.data_ptr()


def test_memory_from_inference_mode_is_written_to_outside_of_it() -> None:
    with torch.inference_mode():
        scratch((64,), torch.float32, CPU, "of inference")
    assert bool((scratch((64,), torch.float32, CPU, "of inference").zero_() == 0).all())


def test_memory_for_more_than_a_tile_is_not_kept() -> None:
    held = scratch((1 << 20,), torch.float32, CPU, "large")
    assert scratch((1 << 20,), torch.float32, CPU, "large").data_ptr() != held.data_ptr()


SCHEMES = [n for n in quark.schemes().names() if quark.schemes().load_config(n)().weight is not None]
LARGEST = torch.finfo(torch.float16).max


def near_the_end(largest: float) -> torch.Tensor:
    """``[128, 256]``, float16; its extremes of either sign in some rows."""
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(0)) * 8000
    x[3, 7], x[3, 200], x[64, 40], x[100, 255] = largest, -largest, -largest, largest
    return x.clamp_(-largest, largest).half()


@pytest.mark.parametrize("largest", [62_000.0, LARGEST])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_stay_finite_and_are_what_their_codes_say(scheme: str, largest: float) -> None:
    quantizer, x = quantizer_for(quark.schemes().load_config(scheme)().weight, activation=False), near_the_end(largest)
    values, qparams = quantizer.round_to_nearest(x)
    assert values.dtype is torch.float16
    assert torch.isfinite(values).all()
    codes = quantizer.quantize(x, qparams)
    assert torch.equal(quantizer.codes_of(values, qparams), codes)
    assert torch.equal(cast_finite(quantizer.dequantize(codes, qparams), torch.float16), values), "a reader finds the same"
    assert torch.equal(quantizer.fake_quantize(x, qparams, out=x.clone()), values)


@pytest.mark.parametrize("largest", [62_000.0, LARGEST])
@pytest.mark.parametrize("scheme", [n for n in SCHEMES if quark.schemes().load_config(n)().input_tensors is not None])
def test_activations_stay_finite(scheme: str, largest: float) -> None:
    quantizer, x = quantizer_for(quark.schemes().load_config(scheme)().input_tensors, activation=True), near_the_end(largest)
    observer = quantizer.observer()
    observer.observe(x)
    qparams = None if quantizer.is_dynamic else quantizer.qparams_from(observer)
    assert torch.isfinite(quantizer.fake_quantize(x, qparams)).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_values_of_a_grid_beyond_float16_get_codes_that_it_can_say(scheme: str) -> None:
    """Error feedback from column to column may ask for more than the largest weight."""
    quantizer, wt = (
        quantizer_for(quark.schemes().load_config(scheme)().weight, activation=False),
        near_the_end(LARGEST).float().t().contiguous(),
    )
    grid = WeightGrid([quantizer], [128], wt)
    scales = grid.fixed or grid.scales_of_ranges(*(1.5 * r for r in grid.ranges(wt)))
    each = grid.with_subscales(2 * wt, scales)
    ((weight, qparams, _),) = grid.weights(grid.round_(2 * wt, each), scales, torch.float16)
    assert weight.dtype is torch.float16
    assert torch.isfinite(weight).all()
    again = quantizer.dequantize(quantizer.codes_of(weight, qparams), qparams)
    assert torch.equal(cast_finite(again, torch.float16), weight)


def test_nan_stays_and_other_dtypes_are_left_alone() -> None:
    x = torch.tensor([1e5, -1e5, torch.nan, 3.0])
    assert cast_finite(x, torch.float16)[[0, 1, 3]].tolist() == [LARGEST, -LARGEST, 3.0]
    assert cast_finite(x, torch.float16)[2].isnan()
    assert cast_finite(torch.tensor([torch.inf]), torch.bfloat16).isinf().all(), "what was no number before is none after"
    assert keep_finite_(x.half())[:2].tolist() == [LARGEST, -LARGEST]
    assert keep_finite_(x) is x
