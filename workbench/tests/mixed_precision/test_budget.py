"""A selection has one budget."""

from __future__ import annotations

import pytest

from quark.errors import ConfigError
from quark_workbench.mixed_precision import Budget


def test_there_is_one_budget() -> None:
    with pytest.raises(ConfigError, match="has one budget, and none is given"):
        Budget()
    with pytest.raises(ConfigError, match="has one budget, and bits and kl are given"):
        Budget(bits=5, kl=0.1)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_budget_is_positive(value: float) -> None:
    with pytest.raises(ConfigError, match=r"budget of kl=.* leaves nothing"):
        Budget(kl=value)
