"""A selection has one budget, and sizes are read as people write them."""

from __future__ import annotations

import pytest

from quark.errors import ConfigError
from quark.selection import Budget, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("90MB", 90 * 10**6), ("90 mb", 90 * 10**6), ("1.5GiB", 3 * 2**29), ("2g", 2 * 10**9), ("7KiB", 7168), ("12B", 12)],
)
def test_a_size_is_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-3MB", "3XB", "1e9", "3 MB extra"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is no size: write a number and a unit, such as 90MB"):
        parse_size(text)


def test_there_is_one_budget() -> None:
    with pytest.raises(ConfigError, match="has one budget, and none is given"):
        Budget()
    with pytest.raises(ConfigError, match="has one budget, and bits and kl are given"):
        Budget(bits=5, kl=0.1)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_budget_is_positive(value: float) -> None:
    with pytest.raises(ConfigError, match=r"budget of kl=.* leaves nothing"):
        Budget(kl=value)
