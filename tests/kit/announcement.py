"""What a run of many tests says at its start: how many there are, and about how long they take on this machine."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

MANY = 1000
"""Fewer tests start without an announcement."""
SECONDS = 0.07
"""CPU seconds of a test on average, with its share of imports, on the machine on which `PROBE` was measured."""
PROBE = 0.027
"""CPU seconds of `_probe` there."""


def announcement(tests: int, processes: int, *, few: bool) -> str:
    """Return the line that a run prints before its first test.

    Args:
        tests: How many tests run.
        processes: How many processes share them.
        few: Whether these are a selection.
    """
    minutes = max(1, round(tests * SECONDS * _probe() / PROBE / min(processes, os.cpu_count() or 1) / 60))
    which = "a selection; `make test ALL=1` runs all" if few else "all that are not slow"
    line = f"{tests:,} tests ({which}), processes: {processes}, minutes: about {minutes} if nothing else runs here"
    return "\n".join([line, *caveats()])


def caveats(proc: Path = Path("/proc")) -> list[str]:
    """Return what tests cannot do on this machine.

    Args:
        proc: Where Linux tells about processes.
    """
    if sys.platform == "linux" and not (proc / "cpuinfo").exists():
        return [f"{proc} is not mounted here: torch cannot compute with float16, so some tests fail"]
    return []


def _probe() -> float:
    """Return the CPU seconds of a fixed piece of work, the least of three."""
    return min(_timed() for _ in range(3))


def _timed() -> float:
    begun = time.process_time()
    sum(i * i for i in range(1_000_000))
    return time.process_time() - begun
