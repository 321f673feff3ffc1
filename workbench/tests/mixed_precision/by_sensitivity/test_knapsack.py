"""The knapsack is solved exactly: as well as by trying every choice, and as by HiGHS."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from quark.errors import ConfigError
from quark_workbench.mixed_precision.by_sensitivity.knapsack import _Group, smallest_loss

LOSSES = st.floats(0, 1e3, allow_nan=False) | st.floats(0, 1e-6, allow_nan=False)
GROUPS = st.lists(st.lists(st.tuples(LOSSES, st.integers(0, 10**10)), min_size=1, max_size=4), min_size=1, max_size=5)


def by_trying(groups: list[list[tuple[float, int]]], most: int) -> float:
    """The smallest loss of all choices of that size."""
    every = itertools.product(*groups)
    return min(sum(loss for loss, _ in choice) for choice in every if sum(size for _, size in choice) <= most)


@settings(deadline=None, max_examples=150)
@given(GROUPS, st.floats(0, 1))
def test_it_is_as_good_as_the_best_of_all_choices(groups: list[list[tuple[float, int]]], share: float) -> None:
    least, largest = (sum(chosen(size for _, size in group) for group in groups) for chosen in (min, max))
    most = least + int(share * (largest - least))
    losses, sizes = [[x for x, _ in group] for group in groups], [[s for _, s in group] for group in groups]
    taken = smallest_loss(losses, sizes, most)
    assert sum(size[o] for size, o in zip(sizes, taken, strict=True)) <= most
    found, best = sum(loss[o] for loss, o in zip(losses, taken, strict=True)), by_trying(groups, most)
    # Sums in another order differ by rounding: half a unit in the last place of the sum so far for each
    # group.
    assert found <= best + len(groups) * 2.0**-53 * sum(max(loss) for loss in losses)


def by_highs(losses: list[list[int]], sizes: list[list[int]], most: int) -> list[int]:
    """The options that HiGHS takes: a binary variable for each, of which one in each group is 1."""
    size = np.array([s for group in sizes for s in group], dtype=float)
    member = np.array([[float(g == of) for of, group in enumerate(sizes) for _ in group] for g in range(len(sizes))])
    solution = milp(
        np.array([x for group in losses for x in group], dtype=float),
        constraints=[LinearConstraint(size[None], ub=most), LinearConstraint(member, 1, 1)],
        integrality=np.ones(len(size)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0},
    )
    assert solution.success, solution.message
    parts = np.split(solution.x, np.cumsum([len(group) for group in sizes])[:-1])
    return [int(part.argmax()) for part in parts]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 999), st.integers(0, 999)), min_size=1, max_size=5), min_size=1, max_size=15),
    st.floats(0, 1),
)
def test_it_is_as_good_as_what_highs_finds(groups: list[list[tuple[int, int]]], share: float) -> None:
    # Numbers of three digits: at those of real models, HiGHS's tolerance of 1e-6 lets a choice pass that is
    # too large by many bytes.
    losses, sizes = [[x for x, _ in group] for group in groups], [[s for _, s in group] for group in groups]
    least, largest = sum(map(min, sizes)), sum(map(max, sizes))
    most = least + int(share * (largest - least))
    ours, theirs = smallest_loss(losses, sizes, most), by_highs(losses, sizes, most)
    for taken in (ours, theirs):
        assert sum(size[o] for size, o in zip(sizes, taken, strict=True)) <= most
    found, best = (sum(loss[o] for loss, o in zip(losses, taken, strict=True)) for taken in (ours, theirs))
    assert found == best  # whole numbers, so there is nothing to tolerate


@given(st.lists(st.tuples(st.integers(0, 999), st.integers(0, 999)), min_size=2, max_size=8))
def test_steps_save_ever_less_and_together_all_that_there_is_to_save(options: list[tuple[int, int]]) -> None:
    group = _Group.of(*zip(*options, strict=True))
    steps = group.steps()
    assert [start for _, start, _ in steps] == [0, *(end for _, _, end in steps)][: len(steps)]
    assert all(first > then for (first, *_), (then, *_) in itertools.pairwise(steps))
    saved = sum(saving * (group.extra[end] - group.extra[start]) for saving, start, end in steps)
    assert saved == pytest.approx(group.losses[0] - min(group.losses))


def test_one_byte_decides() -> None:
    losses, sizes = [[0.0, 1.0], [0.0, 3.0]], [[1_000_000_007, 500_000_003], [2_000_000_011, 900_000_001]]
    for less, expected in ((0, [0, 0]), (1, [1, 0])):
        assert smallest_loss(losses, sizes, 3_000_000_018 - less) == expected


def test_an_option_that_is_larger_and_worse_is_never_taken() -> None:
    assert smallest_loss([[1.0, 2.0, 0.5]], [[10, 20, 30]], 25) == [0]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 40)), min_size=30, max_size=60), st.floats(0.05, 0.95))
def test_many_groups_are_solved_as_well_as_by_a_table_of_all_sizes(gains: list[tuple[float, int]], share: float) -> None:
    room = int(share * sum(size for _, size in gains))
    saved = [0.0] * (room + 1)  # the most that is saved in each size: the textbook's table of the 0-1 knapsack
    for gain, size in gains:
        for most in range(room, size - 1, -1):
            saved[most] = max(saved[most], saved[most - size] + gain)
    taken = smallest_loss([[gain, 0.0] for gain, _ in gains], [[0, size] for _, size in gains], room)
    assert sum(size for (_, size), o in zip(gains, taken, strict=True) if o) <= room
    found = sum(gain for (gain, _), o in zip(gains, taken, strict=True) if o)
    assert found >= saved[room] - len(gains) ** 2 * 2.0**-52


def test_a_hundred_groups_of_four_options_are_solved() -> None:
    losses = [[1.0 / (1 + o) * (1 + g % 7) for o in range(4)] for g in range(100)]
    sizes = [[100 + 40 * o + g % 3 for o in range(4)] for g in range(100)]
    most = 16_000
    taken = smallest_loss(losses, sizes, most)
    assert sum(size[o] for size, o in zip(sizes, taken, strict=True)) <= most
    # No exchange of one option for the next larger one fits and helps, and none of two groups does.
    room = most - sum(size[o] for size, o in zip(sizes, taken, strict=True))
    gains = [(sizes[g][o + 1] - sizes[g][o], losses[g][o] - losses[g][o + 1]) for g, o in enumerate(taken) if o < 3]
    assert not [1 for size, gain in gains if size <= room and gain > 0]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"smallest options have the total size 12, but at most 11 is allowed"):
        smallest_loss([[1.0, 0.0], [1.0, 0.0]], [[5, 9], [7, 9]], 11)


def test_options_that_fill_the_budget_to_the_last_byte_are_found() -> None:
    """The best single step saves most for a byte, and leaves no room for the two that are better together."""
    assert smallest_loss([[10.0, 0.0], [6.0, 0.0], [6.0, 0.0]], [[0, 3], [0, 2], [0, 2]], 4) == [0, 1, 1]
