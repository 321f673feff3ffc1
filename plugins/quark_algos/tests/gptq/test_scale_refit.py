"""Scales that are fitted to the codes.

The minimum of a quadratic form, never worse, however much inputs are correlated.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quark.config.enums import Dtype
from quark_algos.gptq.correction import refit

from . import published
from .problems import N, damped, grid_for, grouped, setting

GROUP, M = 16, 6


def case(seed: int, common: float, *, symmetric: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """``Wᵀ``, the weight rounded to nearest, and H with a part that all inputs have in common."""
    s = setting(seed)
    spec = grouped(Dtype.int4, GROUP) if symmetric else grouped(Dtype.uint4, GROUP, symmetric=False)
    grid, scales = grid_for(spec, s.wt)
    importance = torch.rand(96, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5
    return s.wt, grid.round_(s.wt.clone(), scales), damped(s.H + common * s.H.diagonal().mean() * importance @ importance.t(), 0.01)


def loss(wt: Tensor, q: Tensor, h: Tensor, factors: Tensor) -> Tensor:
    """``e h eᵀ`` of each row with scales multiplied by ``factors [M, N]``."""
    return published.objective((wt - q * factors.repeat_interleave(GROUP, 0)).t(), h)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 99), common=st.sampled_from([0.0, 1.0, 30.0]), symmetric=st.booleans())
def test_the_objective_never_grows(seed: int, common: float, symmetric: bool) -> None:
    wt, q, h = case(seed, common, symmetric=symmetric)
    factors = refit(q, wt - q, h, GROUP)
    assert (loss(wt, q, h, factors) <= loss(wt, q, h, torch.ones_like(factors))).all()
    assert ((factors >= 0.5 - 1e-12) & (factors <= 2 + 1e-12)).all()


def test_no_other_scales_do_better() -> None:
    wt, q, h = case(1, 1.0)
    factors = refit(q, wt - q, h, GROUP).requires_grad_()
    (slope,) = torch.autograd.grad(loss(wt, q, h, factors).sum(), factors)
    ones = torch.ones_like(factors).detach().requires_grad_()
    (before,) = torch.autograd.grad(loss(wt, q, h, ones).sum(), ones)
    assert slope.abs().max() < 1e-4 * before.abs().max()  # what the ridge of a millionth leaves


def test_codes_of_a_weight_that_is_on_a_grid_give_its_scales_back() -> None:
    _, q, h = case(2, 1.0)
    wanted = torch.rand(M, N, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 0.8 + 0.6
    wt = q * wanted.repeat_interleave(GROUP, 0)
    torch.testing.assert_close(refit(q, wt - q, h, GROUP), wanted, rtol=0, atol=1e-3)


def test_a_row_that_asks_for_too_much_goes_as_far_as_it_may_and_gains() -> None:
    _, q, h = case(3, 1.0)
    wt = 5 * q
    factors = refit(q, wt - q, h, GROUP)
    assert float(factors.max()) == pytest.approx(2)
    assert (loss(wt, q, h, factors) < loss(wt, q, h, torch.ones_like(factors))).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_groups_of_zeros_keep_their_scale(dtype: torch.dtype) -> None:
    wt, q, h = case(4, 1.0)
    q[:GROUP], q[:, 3] = 0, 0
    factors = refit(q.to(dtype), (wt - q).to(dtype), h.to(dtype), GROUP)
    assert (factors[0] == 1).all()
    assert (factors[:, 3] == 1).all()
    assert (factors[1:, :3] != 1).all()


def test_rows_in_pieces_are_the_rows_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    wt, q, h = case(5, 1.0)
    whole = refit(q, wt - q, h, GROUP)
    monkeypatch.setattr("quark_algos.gptq.correction.PIECE", 5 * M * 96)
    torch.testing.assert_close(refit(q, wt - q, h, GROUP), whole)
