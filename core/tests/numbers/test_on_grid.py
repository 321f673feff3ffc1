"""Values beside their codes: equal, off the grid, or no numbers."""

from __future__ import annotations

import math

import pytest
import torch

from quark.numbers import on_grid, quantizer_for
from quark.numbers.on_grid import grid_error, off_grid
from quark.plugins import schemes

DECODED = torch.tensor([1.0, 2.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_off_grid_tells_values_beside_the_grid_from_values_that_are_no_numbers(dtype: torch.dtype) -> None:
    assert off_grid(DECODED.to(dtype), DECODED) is None
    assert "up to 0.5 away" in (off_grid(torch.tensor([1.0, 2.5], dtype=dtype), DECODED) or "")
    for one in (math.nan, math.inf):
        assert off_grid(torch.tensor([1.0, one], dtype=dtype), DECODED) == "holds NaN or Inf"


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
    assert "no codes stand for" in (grid_error(quantizer, qparams, others) or "")
    assert grid_error(quantizer, qparams, values, wrong_codes, sampled=True) is None
    assert "no codes stand for" in (grid_error(quantizer, qparams, values, wrong_codes) or "")
    assert "no codes stand for" in (grid_error(quantizer, qparams, values + qparams.scale.mean() / 3, sampled=True) or "")
    qparams.scale[7, 1] = math.nan
    assert "NaN" in (grid_error(quantizer, qparams, values, sampled=True) or "")
