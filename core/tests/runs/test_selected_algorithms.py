"""The order of transforms is a topological order by their records; ties keep the order of the names.

If there is no such order, an error names the transforms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import pytest

from quark.errors import ConfigError
from quark.plugins import AlgorithmRecord, Source, algorithms
from quark.runs.selected_algorithms import in_order

Order = Callable[..., list[str]]


@pytest.fixture
def order() -> Iterator[Order]:
    """Return the order of transforms from their records' ``role``, ``before`` and ``after``, by name."""
    names: set[str] = set()

    def of(**records: dict[str, Any]) -> list[str]:
        made = {name: AlgorithmRecord(name=name, kind="transform", config=f"{__name__}:unused", **more) for name, more in records.items()}
        for name, record in made.items():
            if name not in names:
                algorithms().register(record, Source(f"{name}-quant", "0.3"))
                names.add(name)
        return in_order(made)

    yield of
    for name in names:
        algorithms().unregister(name)


def test_without_constraints_it_is_the_order_in_which_they_were_named(order: Order) -> None:
    assert order(t_b={}, t_a={}, t_c={}) == ["t_b", "t_a", "t_c"]


@pytest.mark.parametrize("named", list(permutations(["t_turn", "t_move", "t_last"])))
def test_names_and_roles_decide_and_the_order_of_naming_does_not(order: Order, named: tuple[str, ...]) -> None:
    records: dict[str, Any] = {"t_turn": {"before": ("t_moving",)}, "t_move": {"role": "t_moving"}, "t_last": {"after": ["t_move"]}}
    assert order(**{name: records[name] for name in named}) == ["t_turn", "t_move", "t_last"]


def test_what_is_not_in_the_run_is_no_constraint(order: Order) -> None:
    assert order(t_a={"before": ("nobody",), "after": ("nobody_else",)}, t_b={}) == ["t_a", "t_b"]


def test_two_of_one_role_are_refused_with_both_distributions(order: Order) -> None:
    with pytest.raises(ConfigError, match=r"'t_a' and 't_b' \(of t_a-quant 0\.3 and t_b-quant 0\.3\) have the same role 't_x'"):
        order(t_a={"role": "t_x"}, t_b={"role": "t_x"})


def test_a_circle_is_refused_and_names_its_members_alone(order: Order) -> None:
    with pytest.raises(ConfigError) as caught:
        order(t_free={}, t_a={"before": ("t_b",)}, t_b={"before": ("t_c",)}, t_c={"before": ("t_a",)}, t_behind={"after": ("t_a",)})
    text = str(caught.value)
    assert "no order of " in text
    assert all(f"'{name}' (of {name}-quant 0.3)" in text for name in ("t_a", "t_b", "t_c"))
    assert "t_free" not in text
    assert "t_behind" not in text
