"""Values and their codes; samples of rows, with the rows' scales in the whole matrix."""

from __future__ import annotations

import math

import pytest
import torch

from quark.config.tensor import QTensorConfig
from quark.numbers import TensorQuantizer, on_grid, quantizer_for
from quark.numbers.on_grid import grid_error, off_grid, qparams_of_rows, same_bits, sample_of_rows
from quark.plugins import documented_object, schemes

DECODED = torch.tensor([1.0, 2.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_off_grid_tells_values_beside_the_grid_from_values_that_are_no_numbers(dtype: torch.dtype) -> None:
    assert off_grid(DECODED.to(dtype), DECODED) is None
    assert "by up to 0.5" in (off_grid(torch.tensor([1.0, 2.5], dtype=dtype), DECODED) or "")
    for one in (math.nan, math.inf):
        assert off_grid(torch.tensor([1.0, one], dtype=dtype), DECODED) == "holds NaN or Inf"


SHAPE = (96, 64)
CASES = {
    "groups": ("Int4PerGroupSpec", {"ch_axis": -1, "group_size": 16}),
    "channels of axis 0": ("Int8PerChannelSpec", {"ch_axis": 0}),
    "channels of axis 1, zero points": ("Uint4PerChannelSpec", {"ch_axis": 1}),
    "a tensor": ("FP8E4M3PerTensorSpec", {}),
    "shared exponents": ("OCP_MXFP4Spec", {"ch_axis": -1}),
}


def quantizer(case: str) -> TensorQuantizer:
    if case == "blocks of rows and columns":
        blocks = {"qscheme": "per_block", "block_size": (8, 32), "is_dynamic": False, "symmetric": True}
        return quantizer_for(QTensorConfig(dtype="fp8_e4m3", **blocks), activation=False)
    name, options = CASES[case]
    return quantizer_for(documented_object(name)(**options, is_dynamic=False).to_quantization_spec(), activation=False)


@pytest.mark.parametrize("case", [*CASES, "blocks of rows and columns"])
def test_rows_are_rounded_as_in_the_whole_matrix(case: str) -> None:
    q = quantizer(case)
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 3, SHAPE[0])[:, None]
    values, qparams = q.round_to_nearest(x)
    rows = sample_of_rows(q.granularity, SHAPE, 10 * SHAPE[1])
    assert rows is not None
    assert 2 <= len(values[rows]) <= 10
    assert torch.equal(q.fake_quantize(x[rows], qparams_of_rows(q.granularity, SHAPE, qparams, rows)), values[rows])


def test_small_tensors_and_those_of_other_ranks_are_taken_whole() -> None:
    granularity = quantizer("a tensor").granularity
    assert sample_of_rows(granularity, SHAPE, SHAPE[0] * SHAPE[1]) is None
    assert sample_of_rows(granularity, (96, 64, 3, 3), 1) is None


def test_the_rows_of_a_sample_are_not_the_same_row_of_every_head() -> None:
    rows = sample_of_rows(quantizer("a tensor").granularity, (4096, 64), 64 * 64)
    assert len({row % 64 for row in range(4096)[rows]}) > 32


def test_a_sample_of_rows_is_checked_and_all_scales_are(monkeypatch: pytest.MonkeyPatch) -> None:
    quantizer = quantizer_for(schemes().load_config("int4_wo_32")().weight, activation=False)
    values, qparams = quantizer.round_to_nearest(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
    codes = quantizer.codes_of(values, qparams)
    monkeypatch.setattr(on_grid, "SAMPLE", 1)
    assert grid_error(quantizer, qparams, values, codes, sampled=True) is None
    others, wrong_codes = values.clone(), codes.clone()
    others[5, 3] += qparams.scale[5, 0] / 3
    wrong_codes[5, 3] += 1
    assert grid_error(quantizer, qparams, others, sampled=True) is None
    assert "no code represents" in (grid_error(quantizer, qparams, others) or "")
    assert grid_error(quantizer, qparams, values, wrong_codes, sampled=True) is None
    assert "no code represents" in (grid_error(quantizer, qparams, values, wrong_codes) or "")
    assert "no code represents" in (grid_error(quantizer, qparams, values + qparams.scale.mean() / 3, sampled=True) or "")
    qparams.scale[7, 1] = math.nan
    assert "NaN" in (grid_error(quantizer, qparams, values, sampled=True) or "")


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_bits_are_compared_and_not_numbers(shape: tuple[int, ...]) -> None:
    zero, nan = torch.zeros(shape), torch.full(shape, math.nan)
    assert same_bits(zero, zero.clone())
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, zero.double())
    assert not same_bits(zero, torch.zeros(*shape, 1))
