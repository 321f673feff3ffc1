"""`make test` has a few combinations of each test's parameters; `make test ALL=1` has every one."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tests.kit.covering import covering

PRODUCTS = st.lists(st.integers(1, 12), min_size=1, max_size=3)


def rows_of(sizes: list[int]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, sizes)))


@given(PRODUCTS, st.text(), st.integers(1, 8))
def test_there_are_at_most_so_many_and_at_least_one_and_always_the_same(sizes: list[int], name: str, most: int) -> None:
    rows = rows_of(sizes)
    chosen = covering(rows, name, most)
    assert 1 <= len(chosen) <= most
    assert chosen == sorted(set(chosen)) == covering(rows, name, most)
    assert all(0 <= number < len(rows) for number in chosen)


@given(PRODUCTS)
def test_of_few_values_each_is_there(sizes: list[int]) -> None:
    rows, most = rows_of(sizes), max(sizes)
    chosen = [rows[number] for number in covering(rows, "a test", most)]
    assert [set(column) for column in zip(*chosen, strict=True)] == [set(range(size)) for size in sizes]


def test_of_combinations_that_are_no_product_each_value_is_there() -> None:
    rows = [(0, 0), (1, 1), (2, 0), (2, 1), (3, 3)]
    chosen = [rows[number] for number in covering(rows, "a test", 8)]
    assert {row[0] for row in chosen} == {0, 1, 2, 3}
    assert {row[1] for row in chosen} == {0, 1, 3}


def test_many_tests_together_have_every_value() -> None:
    rows = rows_of([36])
    assert {number for test in range(60) for number in covering(rows, f"test_{test}", 8)} == set(range(36))


def test_a_test_without_parameters_stays() -> None:
    assert covering([()], "a test", 8) == [0]
