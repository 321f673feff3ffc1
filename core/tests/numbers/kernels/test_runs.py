"""Runs: the number of the scale of an element, by where it lies."""

from __future__ import annotations

import pytest

from quark.numbers.kernels import Runs


def numbers(runs: Runs, elements: int) -> list[int]:
    """The number of the scale of each element, as kernels find it."""
    return [run // runs.span * runs.period + run % runs.period for run in (element // runs.length for element in range(elements))]


@pytest.mark.parametrize(
    ("runs", "expected", "own"),
    [
        (Runs(2), [0, 0, 1, 1, 2, 2, 3, 3], True),
        (Runs(2, period=2, span=2), [0, 0, 1, 1, 2, 2, 3, 3], True),
        (Runs(1, period=2, span=4), [0, 1, 0, 1, 2, 3, 2, 3], False),
        (Runs(8), [0] * 8, True),
    ],
)
def test_runs_have_scales_in_turn(runs: Runs, expected: list[int], own: bool) -> None:
    assert numbers(runs, 8) == expected
    assert runs.have_own_scales is own
