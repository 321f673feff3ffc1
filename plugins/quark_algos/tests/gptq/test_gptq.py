"""Ways to go over the columns that must come to the same.

Any block, any piece, scales known before or found on the way.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import quark
from quark.config.enums import Dtype
from quark.numbers import GroupScales
from quark_algos import scale_search as scales_module
from quark_algos.gptq import gptq as sweep
from quark_algos.gptq.damping import factor
from quark_algos.gptq.gptq import ldlq, ldlq_choosing
from quark_algos.scale_search import COARSE, FINE, group_moments, search, stretched

from . import published
from .problems import N, grid_for, grouped, setting

INT4 = grouped(Dtype.int4, 16)
MX6 = quark.schemes().load_config("mx6")().weight


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 99), group=st.sampled_from([16, 24, 32]), symmetric=st.booleans())
def test_scales_on_the_way_that_are_the_static_ones_give_the_same_codes(seed: int, group: int, symmetric: bool) -> None:
    s = setting(seed)
    spec = grouped(Dtype.int4, group) if symmetric else grouped(Dtype.uint4, group, symmetric=False)
    grid, static = grid_for(spec, s.wt)
    found = factor(s.H, 0.01)
    done, scales = ldlq_choosing(s.wt, found, grid, lambda _, number: static.map(lambda x: x[number : number + 1]))
    expected = ldlq(s.wt, found, grid.rounder(static))
    torch.testing.assert_close(done.q, expected.q, rtol=1e-6, atol=0)
    torch.testing.assert_close(done.loss, expected.loss)
    assert torch.equal(scales.stored, static.stored)


@pytest.mark.parametrize("few", [1, 5, 16, 33, 200])
@pytest.mark.parametrize("block", [7, 96])
def test_how_many_columns_go_together_does_not_matter(few: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    s = setting(1)
    order = torch.argsort(s.H.diagonal(), descending=True)
    grid, scales = grid_for(INT4, s.wt)
    found, rounded = factor(s.H, 0.01, order), grid.rounder(scales, order)
    results = []
    for size, columns in ((1, 96), (few, block)):
        monkeypatch.setattr(sweep, "FEW", size)
        monkeypatch.setattr(sweep, "BLOCK", columns)
        results.append(ldlq(s.wt, found, rounded, block=columns, order=order))
    one, other = results
    torch.testing.assert_close(other.q, one.q, rtol=1e-6, atol=0)
    torch.testing.assert_close(other.e, one.e, rtol=1e-6, atol=1e-9)


def test_each_row_is_rounded_as_if_it_were_alone() -> None:
    s = setting(2)
    grid, scales = grid_for(INT4, s.wt)
    found = factor(s.H, 0.01)
    together = ldlq(s.wt, found, grid.rounder(scales))
    for row in range(N):
        alone = ldlq(s.wt[:, row : row + 1], found, grid.rounder(scales.map(lambda x, r=row: x[:, r : r + 1])))  # type: ignore[misc]
        torch.testing.assert_close(alone.q[:, 0], together.q[:, row], rtol=1e-6, atol=0)
        torch.testing.assert_close(alone.loss[0], together.loss[row])


def test_errors_come_back_to_their_own_channels() -> None:
    s = setting(3)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(3))
    grid, scales = grid_for(INT4, s.wt)
    done = ldlq(s.wt, factor(s.H, 0.01, order), grid.rounder(scales, order), order=order)
    torch.testing.assert_close(done.e, (s.wt - done.q)[order])
    assert not torch.allclose(done.e, s.wt - done.q)


def losses(wt: torch.Tensor, q: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return ((wt - q).double().square() * weights.double()[:, None]).sum(0)


def test_ranges_of_wide_groups_are_judged_by_the_diagonal(monkeypatch: pytest.MonkeyPatch) -> None:
    s = setting(5)
    wt, H = s.wt.float(), s.H.float()
    grid, plain = grid_for(grouped(Dtype.int4, 96), s.wt)
    diagonal = H.diagonal()
    by_hand = search(wt, grid, group_moments(torch.diag(diagonal), 96))  # as a whole block, which is no wider than allowed
    assert not torch.equal(by_hand.scale, search(wt, grid, None).scale)
    monkeypatch.setattr(scales_module, "WIDEST", 95)
    wide = search(wt, grid, group_moments(H, 96))
    assert torch.equal(wide.scale, by_hand.scale)
    found, before = (losses(wt, grid.round_(wt.clone(), x), diagonal) for x in (wide, plain))
    assert (found <= before).all()
    assert (found < before).any()
    monkeypatch.setattr(scales_module, "WIDEST", 96)
    assert not torch.equal(search(wt, grid, group_moments(H, 96)).scale, wide.scale), "off the diagonal there is something to see"


@pytest.mark.parametrize("spec", [INT4, MX6], ids=["int4", "mx6"])
def test_pieces_of_rows_do_not_matter_to_the_search(spec: object, monkeypatch: pytest.MonkeyPatch) -> None:
    s = setting(6)
    wt, H = s.wt.float(), s.H.float()
    grid, _ = grid_for(spec, s.wt)  # type: ignore[arg-type]
    moments = group_moments(H, grid.group)
    whole = search(wt, grid, moments)
    monkeypatch.setattr(scales_module, "PIECE", 96 * 5)
    parts = search(wt, grid, moments)
    assert isinstance(parts, GroupScales)
    assert (parts.scale == whole.scale).float().mean() > 0.97, "products of another width may choose the other of two that are as good"


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), weighted=st.booleans())
def test_the_search_is_never_worse_than_the_whole_range(seed: int, weighted: bool) -> None:
    s = setting(seed, K=32)
    wt, H = s.wt.float(), s.H.float()
    grid, plain = grid_for(INT4, s.wt)
    blocks = [(s.H if weighted else torch.eye(32).double())[i : i + 16, i : i + 16] for i in (0, 16)]

    def loss(x: GroupScales) -> torch.Tensor:
        e = (grid.round_(wt.clone(), x) - wt).double()
        return torch.stack([published.objective(e[i * 16 : i * 16 + 16].t(), b) for i, b in enumerate(blocks)])

    assert (loss(search(wt, grid, group_moments(H, 16) if weighted else None)) <= loss(plain) * (1 + 1e-5)).all()


def test_the_search_goes_on_finely_around_the_best_coarse_range() -> None:
    s = setting(7)
    wt = s.wt.float()
    grid, _ = grid_for(INT4, s.wt)
    low, high = grid.ranges(wt)

    def loss(x: GroupScales) -> torch.Tensor:
        return (grid.round_(wt.clone(), x) - wt).double().square().view(6, 16, N).sum(1)

    factors = (*COARSE, *stretched(grid))
    coarse = torch.stack([loss(grid.scales_of_ranges(low * f, high * f)) for f in factors])
    best = torch.tensor(factors)[coarse.argmin(0)]
    fine = torch.stack([loss(grid.scales_of_ranges(low * (best + f), high * (best + f))) for f in (0.0, *FINE)]).amin(0)
    torch.testing.assert_close(loss(search(wt, grid, None)), fine, rtol=1e-5, atol=0)
    assert (fine < coarse.amin(0)).float().mean() > 0.3


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_the_process_has_as_many_threads_afterwards_as_before_even_where_a_rounding_fails() -> None:
    s = setting(12)
    grid, scales = grid_for(INT4, s.wt)
    found = factor(s.H, 0.01)
    ldlq(s.wt, found, grid.rounder(scales))
    assert torch.get_num_threads() == 2

    def failing(t: Tensor, k: int, out: Tensor) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ldlq(s.wt, found, failing)
    assert torch.get_num_threads() == 2
