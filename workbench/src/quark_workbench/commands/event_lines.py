"""``--json`` of commands that work: an event on each line of stdout, as JSON, and the result on the last."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quark.plugins import Event

__all__ = ["EventLines", "print_result", "with_event_lines"]

SECONDS_BETWEEN_PHASES = 1.0
"""Least time between two lines on phases inside blocks: a block of a mixture has thousands."""


class EventLines:
    """A listener that prints each event as a line of JSON.

    There is at most one line in a second for phases inside blocks.

    Args:
        write: Writes one line.
        now: Returns the time in seconds.

    Attributes:
        has_failed: Whether the end of a run that failed has been printed.
    """

    def __init__(self, write: Callable[[str], object], now: Callable[[], float] = time.monotonic) -> None:
        self._write, self._now = write, now
        self._last_phase = now() - SECONDS_BETWEEN_PHASES
        self.has_failed = False

    def __call__(self, event: Event) -> None:
        """Hear one event."""
        from quark.plugins.events import PhaseStarted, RunFailed

        if isinstance(event, PhaseStarted) and event.block is not None:
            if self._now() - self._last_phase < SECONDS_BETWEEN_PHASES:
                return
            self._last_phase = self._now()
        self.has_failed = isinstance(event, RunFailed)
        self._write(json.dumps(event.to_dict(), ensure_ascii=False))


def with_event_lines(task: str, command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that, with ``--json``, prints the events of its runs.

    Of several processes, the first prints.

    Args:
        task: What it does, for errors that come before its run.
        command: Has an argument ``as_json``; with ``dry_run``, where it has that, it prints a plan, and no
            events.
    """

    @functools.wraps(command)
    def told(**values: Any) -> None:
        is_asked = values["as_json"] and not values.get("dry_run") and int(os.environ.get("RANK", "0")) == 0
        with _event_lines(task) if is_asked else nullcontext():
            command(**values)

    return told


@contextmanager
def _event_lines(task: str) -> Iterator[None]:
    """Print the events of the body's runs to stdout.

    An error that comes before a run, or after it, is one too.
    """
    from quark.plugins import RunFailed, listening

    lines = EventLines(_print)
    try:
        with listening(lines, "--json"):
            yield
    except BaseException as error:
        if not lines.has_failed:
            lines(RunFailed(task=task, error=type(error).__name__, message=str(error)))
        raise


def print_result(facts: Mapping[str, Any]) -> None:
    """Print the last line: the result of a command."""
    from quark.plugins.events import EVENTS_VERSION

    _print(json.dumps({"event": "result", "version": EVENTS_VERSION, **facts}, ensure_ascii=False))


def _print(line: str) -> None:
    print(line, flush=True)
