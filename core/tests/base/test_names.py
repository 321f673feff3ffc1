"""Folded names of layers lose no name, add no name, and stay short."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quark.base.names import fold_names, folded, without_numbers

parts = st.sampled_from(["layers", "q_proj", "0", "1", "2", "7", "10", "01"])
names = st.lists(st.lists(parts, min_size=1, max_size=4).map(".".join))


def unfolded(pattern: str) -> list[str]:
    """Return the names that a folded name stands for."""
    choices = [numbers(group) if group.startswith("{") else [group] for group in re.split(r"\.(?![^{]*})", pattern)]
    return [".".join(choice) for choice in itertools.product(*choices)]


def numbers(group: str) -> list[str]:
    """Return 0, 1, 2 and 7 for ``{0-2,7}``."""
    ranges = [part.split("-") for part in group.strip("{}").split(",")]
    return [str(n) for bounds in ranges for n in range(int(bounds[0]), int(bounds[-1]) + 1)]


@given(names)
def test_patterns_stand_for_exactly_the_names_given_each_once(given_names: list[str]) -> None:
    covered = [name for pattern in fold_names(given_names) for name in unfolded(pattern)]
    assert sorted(covered) == sorted(set(given_names))


@given(names)
def test_a_pattern_joins_only_what_differs_in_numbers(given_names: list[str]) -> None:
    for pattern in fold_names(given_names):
        assert len({without_numbers(name) for name in unfolded(pattern)}) == 1


def test_a_whole_product_of_numbers_is_one_pattern() -> None:
    every = [f"model.layers.{i}.mlp.experts.{e}.up_proj" for i in range(48) for e in range(128)]
    assert fold_names(every) == ["model.layers.{0-47}.mlp.experts.{0-127}.up_proj"]


def test_what_is_no_product_is_told_by_as_many_patterns_as_it_takes() -> None:
    some = ["layers.0.experts.0", "layers.0.experts.1", "layers.1.experts.1", "layers.2.experts.0", "layers.2.experts.1"]
    assert fold_names(some) == ["layers.{0,2}.experts.{0-1}", "layers.1.experts.1"]


@pytest.mark.parametrize("name", ["layers.00.q", "layers." + "9" * 5000, "layers.²"])
def test_what_is_no_number_of_a_module_stays_a_word(name: str) -> None:
    assert fold_names([name, "layers.1.q"]) == [name, "layers.1.q"]


def test_entries_beyond_the_most_are_counted() -> None:
    assert folded([f"block.{letter}" for letter in "abcdefghij"], most=3) == "block.a, block.b, block.c and 7 more"
    assert folded([]) == ""
