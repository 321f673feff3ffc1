"""The announcement at the start of many tests: their number, and their approximate time on this machine."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

MANY = 1000
"""Least number of tests that are announced."""
SECONDS = 0.07
"""Mean CPU seconds of a test, with its share of imports, on the machine on which `PROBE` was measured."""
PROBE = 0.027
"""CPU seconds of `_probe` on the same machine."""


def announcement(tests: int, processes: int, *, few: bool) -> str:
    """Return the line that a run prints before its first test.

    Args:
        tests: Number of tests.
        processes: Number of processes that run the tests.
        few: Whether the tests are a selection.
    """
    minutes = max(1, round(tests * SECONDS * _probe() / PROBE / min(processes, os.cpu_count() or 1) / 60))
    which = "a selection; `make test ALL=1` runs all" if few else "all that are not slow"
    line = f"{tests:,} tests ({which}), processes: {processes}, minutes: about {minutes} if nothing else runs here"
    return "\n".join([line, *caveats()])


def caveats(proc: Path = Path("/proc")) -> list[str]:
    """Return a warning for each known cause of failing tests on this machine.

    Args:
        proc: Linux's folder of processes.
    """
    if sys.platform == "linux" and not (proc / "cpuinfo").exists():
        return [f"{proc} is not mounted here: torch cannot compute with float16, so some tests fail"]
    return []


def _probe() -> float:
    """Return the least CPU seconds of a fixed piece of work in three trials."""
    return min(_timed() for _ in range(3))


def _timed() -> float:
    begun = time.process_time()
    sum(i * i for i in range(1_000_000))
    return time.process_time() - begun
