"""The display of a run: a progress bar if stderr is a terminal, or else lines in the log."""

from __future__ import annotations

import functools
import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from quark.base.log import beside_a_bar, get_logger, shown, writes_to_stderr
from quark.plugins.events import (
    BatchFinished,
    BlockFinished,
    BlockStarted,
    Event,
    PhaseStarted,
    RunFailed,
    RunFinished,
    RunPlanned,
    RunStarted,
)

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Bar", "Display", "LogLines", "display", "duration"]

SECONDS_BETWEEN_LINES = 5.0
"""The least number of seconds between two progress lines."""
_SHORT = 0.5
"""Evaluations shorter than this, in seconds, get no bar, since programs run many of them."""
_LOGGER = "quark.progress"
"""The logger of progress lines, which the bar replaces."""
_DOING = {"quantize": "Quantizing", "select": "Choosing schemes", "evaluate": "Evaluating", "report": "Reporting", "export": "Exporting"}
_DONE = {"quantize": "Quantized", "evaluate": "Evaluated", "report": "Measured"}
_PHASES = {
    "plan": "planning",
    "data": "reading calibration data",
    "load": "loading the weights outside the blocks",
    "validate": "validating transforms of the whole model",
    "select": "measuring how sensitive layers are",
    "evaluate": "scoring",
    "compare": "comparing hidden states with the float model",
    "write": "writing",
    "report": "making the report",
}
"""Dictionary from a phase outside the blocks to the words that the bar shows."""
_LOGGED = ("data", "validate", "select", "compare")
"""Phases that may take long; the log names them too."""


def duration(seconds: float) -> str:
    """Return a number of seconds in words.

    >>> duration(8.4), duration(95), duration(7300)
    ('8 s', '1 min 35 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


class LogLines:
    """A listener that logs a run: its start, its end, its long phases and, at intervals, its progress.

    Args:
        now: Function that returns the time in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last = now()

    def __call__(self, event: Event) -> None:
        """Handle one event."""
        if (line := self._line(event)) is not None:
            get_logger(_LOGGER).info(line)

    def _line(self, event: Event) -> str | None:
        if isinstance(event, RunPlanned) and event.samples:
            return f"Calibrating with {event.samples} forward pass(es), one block at a time."
        if isinstance(event, PhaseStarted) and event.block is None:
            return f"{_PHASES[event.phase].capitalize()}." if event.phase in _LOGGED else None
        if isinstance(event, BlockFinished | BatchFinished) and self._now() - self._last > SECONDS_BETWEEN_LINES:
            self._last = self._now()
            things = "blocks" if isinstance(event, BlockFinished) else "batches"
            of = "" if event.total is None else f" of {event.total}"
            left = "" if event.seconds_left is None or event.number == event.total else f", about {duration(event.seconds_left)} left"
            return f"{_DONE.get(event.task, 'Finished')} {event.number}{of} {things}{left}."
        if isinstance(event, RunFinished) and event.task == "quantize":
            return "Model quantization has been completed."
        return None


class Bar:
    """A listener that draws a progress bar. The bar shows the current block or phase, and the remaining time.

    Args:
        console: The rich console to draw on.
        now: Function that returns the time in seconds.
    """

    def __init__(self, console: Console, now: Callable[[], float] = time.monotonic) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[count]}"))
        times = (TimeElapsedColumn(), TextColumn("{task.fields[left]}"))
        self._progress = Progress(*columns, *times, console=console, transient=True, refresh_per_second=4)
        self._task = self._progress.add_task("", total=None, count="", left=_Left(now))
        self._left = self._progress.tasks[0].fields["left"]
        self._is_drawn = False
        self._doing, self._phase = "", ""

    def __call__(self, event: Event) -> None:
        """Handle one event."""
        if not self._is_drawn and not (event.task == "evaluate" and event.elapsed < _SHORT):
            self._is_drawn = True
            self._progress.start()
        if isinstance(event, RunStarted):
            self._doing, self._phase = _DOING.get(event.task, event.task.capitalize()), ""
        elif isinstance(event, BlockStarted):
            self._phase = f" {event.block}"
            if event.number == 1:
                self._left.set(None)
            self._count(event.number - 1, event.total)
        elif isinstance(event, PhaseStarted):
            self._phase = f": {_PHASES.get(event.phase, event.phase)}" if event.block is None else f" {event.block}: {event.phase}"
            if event.block is None:
                self._left.set(None)
        elif isinstance(event, BlockFinished | BatchFinished):
            self._count(event.number, event.total)
            self._left.set(event.seconds_left)
        self._progress.update(self._task, description=shown(f"{self._doing}{self._phase}"))

    def _count(self, number: int, total: int | None) -> None:
        self._progress.update(self._task, completed=number, total=total, count=f"{number}/{total}" if total else str(number))

    def close(self) -> None:
        """Remove the bar."""
        self._progress.stop()


class _Left:
    """The remaining time as text. The time counts down between two events."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._end: float | None = None

    def set(self, seconds: float | None) -> None:
        """Set the remaining time. None means that the time is not known."""
        self._end = None if seconds is None else self._now() + seconds

    def __str__(self) -> str:
        return "" if self._end is None else f"{duration(max(self._end - self._now(), 0.0))} left"


class Display:
    """A listener that shows the run of each thread, as log lines or as a progress bar.

    It shows a bar instead of log lines if stderr is a terminal and quark itself writes its log there. Other
    log lines then appear above the bar. If the application has configured logging, there is no bar.

    The display shows nothing if the logger ``quark`` drops messages of the level INFO.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def __call__(self, event: Event) -> None:
        """Handle one event."""
        if isinstance(event, RunStarted):
            self._of_thread.run = _DisplayedRun()
        run: _DisplayedRun | None = getattr(self._of_thread, "run", None)
        if run is None:
            return
        try:
            for listener in run.listeners:
                listener(event)
        finally:
            if isinstance(event, RunFinished | RunFailed):
                run.close()
                self._of_thread.run = None


display = Display()
"""The display of this process."""


class _DisplayedRun:
    """The listeners that show one run. `close` ends the display."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.listeners: list[Callable[[Event], None]] = []
        if not get_logger(_LOGGER).isEnabledFor(logging.INFO):
            return
        self.listeners.append(LogLines())
        if sys.stderr.isatty() and writes_to_stderr():
            from rich.console import Console

            console = Console(file=sys.stderr)
            bar, write = Bar(console), functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
            self.listeners.append(bar)
            self._stack.enter_context(beside_a_bar(write, _LOGGER))
            self._stack.callback(bar.close)

    def close(self) -> None:
        self._stack.close()
