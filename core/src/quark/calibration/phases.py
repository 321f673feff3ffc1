"""PhaseClock: measures the seconds that a run spends in each phase.

The time of a phase that is entered inside another phase is not counted for the outer phase.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

PHASES = ("load", "transforms", "forward", "statistics", "solve", "tune", "write", "report")
"""The phases of a block, in the order of a report. In the phase ``report``, metrics for the report are
measured.
"""


class PhaseClock:
    """Measures the seconds that are spent in each phase.

    GPU kernels run asynchronously, and the clock does not synchronize. So the time of a kernel is counted for
    the phase that waits for it.

    Args:
        now: A function that returns the time in seconds.
        changed: A callback that is called with the name of the current phase whenever the phase changes.

    Attributes:
        seconds: A dictionary from phase to the seconds spent in it since the clock was created.

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
        """Add the time of the body of the ``with`` statement to the phase ``name``."""
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
        """Return the seconds that were spent in each phase since the previous call of this method.

        The time since the last change of the phase is not included yet.
        """
        lap = {name: seconds - self._at_lap.get(name, 0.0) for name, seconds in self.seconds.items()}
        self._at_lap = dict(self.seconds)
        return {name: seconds for name, seconds in lap.items() if seconds > 0}

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add ``seconds`` to the phases. It is a result of `lap`, for example in an earlier process."""
        for name, value in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value
            self._at_lap[name] = self._at_lap.get(name, 0.0) + value

    def _count(self) -> None:
        """Add the time since the previous call of this method to the current phase."""
        now = self._now()
        if self._phases:
            phase = self._phases[-1]
            self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now
