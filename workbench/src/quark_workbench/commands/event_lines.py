"""The output of ``--json``: each line of stdout is one event as JSON, and the last line is the result."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quark.plugins import Event

__all__ = ["EventLines", "event_lines", "print_result"]

SECONDS_BETWEEN_PHASES = 1.0
"""Least time in seconds between two lines about phases inside blocks.

A block of a mixture-of-experts model has thousands of such phases.
"""


class EventLines:
    """A listener that prints each event as a line of JSON.

    For the phases inside a decoder block, it prints at most one line per second.

    Args:
        write: Function that writes one line.
        now: Function that returns the time in seconds.

    Attributes:
        has_failed: Whether the last printed event is the failure of a run.
    """

    def __init__(self, write: Callable[[str], object], now: Callable[[], float] = time.monotonic) -> None:
        self._write, self._now = write, now
        self._last_phase = now() - SECONDS_BETWEEN_PHASES
        self.has_failed = False

    def __call__(self, event: Event) -> None:
        """Handle one event."""
        from quark.plugins.events import PhaseStarted, RunFailed

        if isinstance(event, PhaseStarted) and event.block is not None:
            if self._now() - self._last_phase < SECONDS_BETWEEN_PHASES:
                return
            self._last_phase = self._now()
        self.has_failed = isinstance(event, RunFailed)
        self._write(json.dumps(event.to_dict(), ensure_ascii=False))


@contextmanager
def event_lines(task: str, values: Mapping[str, Any]) -> Iterator[None]:
    """Print to stdout the events of all runs inside the ``with`` statement, if the user gives ``--json``.

    An error before or after a run is printed as an event too. If there are several processes, only the first
    one prints.

    Args:
        task: The kind of work, such as quantization. The event of an error outside a run names this task.
        values: The values of the command's options: ``as_json``, and ``dry_run`` if the command has it. With
            ``dry_run``, the command prints a plan, and no events are printed.
    """
    from quark.plugins import RunFailed, listening

    if not values["as_json"] or values.get("dry_run") or int(os.environ.get("RANK", "0")):
        yield
        return
    lines = EventLines(_print)
    try:
        with listening(lines, "--json"):
            yield
    except BaseException as error:
        if not lines.has_failed:
            lines(RunFailed(task=task, error=type(error).__name__, message=str(error)))
        raise


def print_result(facts: Mapping[str, Any]) -> None:
    """Print the result of a command as the last line of JSON."""
    from quark.plugins.events import EVENTS_VERSION

    _print(json.dumps({"event": "result", "version": EVENTS_VERSION, **facts}, ensure_ascii=False))


def _print(line: str) -> None:
    print(line, flush=True)
