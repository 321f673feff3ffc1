"""The search of scales: which factor is taken, and when the search of spanning scales ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quark_algos import scale_search
from quark_algos.scale_search import STEP, _Best, search


@pytest.mark.parametrize("where", [None, torch.tensor([True, True])], ids=["anywhere", "where"])
def test_of_factors_of_one_loss_the_first_is_kept(where: Tensor | None) -> None:
    best = _Best(torch.zeros_like, torch.ones(2))
    assert not best.attempt(torch.full((2,), 0.5), where).any()
    assert best.factor.tolist() == [1, 1]


class SpanningGrid:
    """A grid with one scale for all rows; its scales are the factor alone."""

    gap = 1.0
    spans = torch.zeros(1, 4, dtype=torch.long)
    number_of_spans = 1
    group = 8

    def spanning(self, factor: Tensor) -> Any:
        self.factor = factor
        return self

    def of_rows(self, rows: slice) -> Tensor:
        return self.factor


@pytest.mark.parametrize("failures", range(4))
def test_the_search_goes_on_after_one_factor_that_improves_nothing_and_ends_after_two(
    failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowest = (1 - STEP) ** (failures + 1)

    def loss(w: Tensor, grid: Any, factor: Tensor, weights: Any, scratch: Tensor) -> Tensor:
        return torch.where((factor - lowest).abs() < 1e-4, 0.0, 2 - factor).expand(1, w.shape[1])

    monkeypatch.setattr(scale_search, "_loss", loss)
    found: Any = search(torch.zeros(8, 4), SpanningGrid(), None)  # type: ignore[arg-type]
    assert found.factor.item() == pytest.approx(lowest if failures < 2 else 1)
