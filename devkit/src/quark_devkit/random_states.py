"""Random states that all code of a process shares. Drawing from such a state affects all its users."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from quark_devkit.check import require

__all__ = ["random_states_kept"]


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Require that the body does not change the random states of torch, Python and numpy. Restore those of
    torch and Python."""
    before, python = _states(), random.getstate()
    with torch.random.fork_rng(devices=[]):
        yield
        changed = [name for name, state in _states().items() if state != before.get(name, state)]
    random.setstate(python)
    require(not changed, f"changes the random state of {' and '.join(changed)}, which other code uses: use a separate generator")


def _states() -> dict[str, object]:
    states: dict[str, object] = {"torch": torch.get_rng_state().numpy().tobytes(), "Python": random.getstate()}
    if "numpy" in sys.modules:
        numpy: Any = sys.modules["numpy"]
        states["numpy"] = repr(numpy.random.get_state())
    return states
