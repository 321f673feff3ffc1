"""Values beside their codes: equal, off the grid, or no numbers."""

from __future__ import annotations

import math

import pytest
import torch

from quark.numbers.on_grid import off_grid

DECODED = torch.tensor([1.0, 2.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_off_grid_tells_values_beside_the_grid_from_values_that_are_no_numbers(dtype: torch.dtype) -> None:
    assert off_grid(DECODED.to(dtype), DECODED) is None
    assert "up to 0.5 away" in (off_grid(torch.tensor([1.0, 2.5], dtype=dtype), DECODED) or "")
    for one in (math.nan, math.inf):
        assert off_grid(torch.tensor([1.0, one], dtype=dtype), DECODED) == "holds NaN or Inf"
