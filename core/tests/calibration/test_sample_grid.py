"""SampleGrid and Sums.

Calls are divided completely, and deterministic sums have the same bits for any number of ranks.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quark.algorithms import AbsMean, CrossMoment, Hessian
from quark.base.ranks import Ranks
from quark.calibration.sample_grid import CELLS, SampleGrid, Sums
from quark_devkit.threads import in_threads

KINDS = (Hessian, CrossMoment, AbsMean)
CPU = torch.device("cpu")


@given(st.integers(1, 200), st.integers(1, 70), st.booleans())
def test_each_call_is_one_ranks_and_ranks_have_consecutive_calls(calls: int, size: int, is_deterministic: bool) -> None:
    grids = [SampleGrid(calls, Ranks(rank, size, is_deterministic)) for rank in range(size)]
    assert [n for grid in grids for n in range(calls)[grid.own]] == list(range(calls))


@given(st.integers(1, 200))
def test_cells_do_not_depend_on_ranks_and_are_of_consecutive_calls(calls: int) -> None:
    cells = [SampleGrid(calls, Ranks(1, 3, True)).cell(n) for n in range(calls)]
    assert cells == [SampleGrid(calls).cell(n) for n in range(calls)]
    assert cells == sorted(cells)
    assert set(cells) == set(range(min(calls, CELLS)))


def tokens_of(call: int) -> Tensor:
    """Return tokens of very different magnitudes, so the order of additions matters; some calls have none."""
    generator = torch.Generator().manual_seed(call)
    return torch.randn(0 if call % 5 == 3 else 3 + call % 4, 24, generator=generator) * 10 ** (call % 7)


def summed(ranks: Ranks, calls: int) -> list[Tensor]:
    grid = SampleGrid(calls, ranks)
    sums = Sums(KINDS, 24, CPU, grid)
    for call in range(calls)[grid.own]:
        sums.update(tokens_of(call), tokens_of(call) * 1.01, call)
    found = sums.of_all_ranks()
    assert {statistic.tokens for statistic in found.values()} == {sum(len(tokens_of(call)) for call in range(calls))}
    hessian, cross, mean = (found[kind] for kind in KINDS)
    assert isinstance(hessian, Hessian)
    assert isinstance(cross, CrossMoment)
    assert isinstance(mean, AbsMean)
    return [hessian.matrix(), cross.matrix(), mean.value, torch.tensor(hessian.shrinkage())]


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 150), st.integers(2, 7))
def test_deterministic_sums_have_the_same_bits_for_any_number_of_ranks(calls: int, size: int) -> None:
    (alone,) = in_threads(lambda ranks: summed(ranks, calls), 1, is_deterministic=True)
    for sums in in_threads(lambda ranks: summed(ranks, calls), size, is_deterministic=True):
        assert all(torch.equal(one, other) for one, other in zip(alone, sums, strict=True))


@pytest.mark.parametrize("size", [2, 3])
def test_other_sums_are_the_same_on_all_ranks_and_nearly_those_of_one(size: int) -> None:
    (alone,) = in_threads(lambda ranks: summed(ranks, 20), 1)
    first, *others = in_threads(lambda ranks: summed(ranks, 20), size)
    for other in others:
        assert all(torch.equal(one, each) for one, each in zip(first, other, strict=True))
    for one, each in zip(alone, first, strict=True):
        # A sum of 100 products is wrong by at most 100 units of its largest partial sum, whatever the order.
        torch.testing.assert_close(each, one, rtol=1e-5, atol=float(100 * torch.finfo(torch.float32).eps * one.abs().max()))


class QuarterOfTokens(Hessian):
    one_in = 4


@pytest.mark.parametrize("of_caller", [1, 2, 4, 8])
def test_a_statistic_sees_as_few_tokens_as_it_asks_for(of_caller: int) -> None:
    x = torch.randn(64, 24, generator=torch.Generator().manual_seed(0))
    sums = Sums((QuarterOfTokens, Hessian), 24, CPU, SampleGrid(1))
    sums.update(x[::of_caller], None, 0, of_caller)
    of_some, of_all = sums.of_all_ranks().values()
    assert isinstance(of_some, Hessian)
    assert (of_some.tokens, of_all.tokens) == (64 // max(4, of_caller), 64 // of_caller)
    sample = x[:: max(4, of_caller)]
    torch.testing.assert_close(of_some.matrix(), sample.t() @ sample)


@pytest.mark.parametrize("inputs_last", [False, True])
def test_inputs_may_change_behind_an_update_unless_they_are_said_to_last(inputs_last: bool) -> None:
    x = torch.ones(3, 24)
    sums = Sums((Hessian,), 24, CPU, SampleGrid(1), inputs_last=inputs_last)
    sums.update(x, None, 0)
    x.zero_()
    (hessian,) = sums.of_all_ranks().values()
    assert isinstance(hessian, Hessian)
    assert hessian.matrix().max() == (0 if inputs_last else 3)


def test_one_rank_holds_few_sums_at_a_time() -> None:
    sums = Sums((AbsMean,), 24, CPU, SampleGrid(256, Ranks(is_deterministic=True)))
    for call in range(256):
        sums.update(tokens_of(call), None, call)
        assert len(sums._subtrees) <= 6  # one for each level of the tree of 64 cells
