"""Who draws from a random state that all code shares, or seeds it, is found; and it is put back."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from quark_devkit.check import CheckFailedError
from quark_devkit.random_states import random_states_kept


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda: torch.rand(1), "torch"),
        (lambda: torch.manual_seed(3), "torch"),
        (random.random, "Python"),
        (np.random.rand, "numpy"),
    ],
)
def test_a_changed_state_is_named(draw: Callable[[], object], name: str) -> None:
    before = torch.get_rng_state(), random.getstate()
    with pytest.raises(CheckFailedError, match=f"changes the random state of {name},"), random_states_kept():
        draw()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_a_generator_of_its_own_passes() -> None:
    with random_states_kept():
        torch.rand(3, generator=torch.Generator().manual_seed(1))
        random.Random(3).random()
        np.random.default_rng(3).random()
