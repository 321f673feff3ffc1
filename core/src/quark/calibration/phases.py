"""PhaseClock: the seconds that a run spends in each phase.

A phase that is entered inside another is not counted in the outer one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

PHASES = ("load", "transforms", "forward", "statistics", "solve", "tune", "write", "report")
"""The phases of a block, in the order of a report; ``report`` is the time of measuring for the report.
"""


class PhaseClock:
    """Measures seconds by phase.

    On a GPU, kernels run asynchronously: their time counts in the phase that waits for them. Nothing is
    synchronized for the clock.

    Args:
        now: Returns the time in seconds.
        changed: Called with the current phase whenever it changes.

    Attributes:
        seconds: Seconds by phase since the clock was created.

    Example:
        >>> times = iter([0.0, 1.0, 4.0, 6.0])
        >>> clock = PhaseClock(lambda: next(times))
        >>> with clock.phase("forward"):      # at 0
        ...     with clock.phase("solve"):    # at 1
        ...         pass                      # until 4; the outer phase continues until 6
        >>> clock.seconds
        {'forward': 3.0, 'solve': 3.0}
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter, changed: Callable[[str], None] = lambda _: None) -> None:
        self._now = now
        self._changed = changed
        self._phases: list[str] = []
        self._since = 0.0
        self._at_lap: dict[str, float] = {}
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the body in the phase of that name."""
        self._count()
        self._phases.append(name)
        self._changed(name)
        try:
            yield
        finally:
            self._count()
            self._phases.pop()
            if self._phases:
                self._changed(self._phases[-1])

    def lap(self) -> dict[str, float]:
        """Return the seconds of each phase since the previous call of this method.

        The time since the phase last changed is not counted yet.
        """
        lap = {name: seconds - self._at_lap.get(name, 0.0) for name, seconds in self.seconds.items()}
        self._at_lap = dict(self.seconds)
        return {name: seconds for name, seconds in lap.items() if seconds > 0}

    def add(self, seconds: Mapping[str, float]) -> None:
        """Count the seconds of an earlier lap."""
        for name, value in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value
            self._at_lap[name] = self._at_lap.get(name, 0.0) + value

    def _count(self) -> None:
        """Add the time since the last change to the current phase."""
        now = self._now()
        if self._phases:
            phase = self._phases[-1]
            self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now
