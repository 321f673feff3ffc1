"""Checks of a distribution's event hook: it accepts every event, quickly, and does not write to stdout."""

from __future__ import annotations

import contextlib
import io
import math
import time
from itertools import product
from typing import Any

import attrs

from quark.plugins.collection import Listener
from quark.plugins.events import EVENTS, Event
from quark_devkit.check import CheckFailedError, assume, check, require
from quark_devkit.checks.distribution.facts import refuse_left_out
from quark_devkit.process_state import changes, shared_state
from quark_devkit.subject import Subject

MOST_SECONDS = 0.02
"""Longest mean time of a listener per event, in CPU time and in wall-clock time. A block has thousands of
events."""
_ROUNDS = 3


@attrs.frozen(kw_only=True)
class _LaterEvent(Event):
    """An event of a future version of quark."""

    name = "event_of_a_later_version"


def _examples() -> list[Event]:
    """Return an event of each kind, in which most values have their defaults (None or empty), as at the start
    of a run."""
    values: dict[str, Any] = {"task": "quantize", "elapsed": 1.5}
    return [*(kind(**values) for kind in EVENTS), _LaterEvent(**values)]


def _listeners(subject: Subject) -> list[Listener]:
    refuse_left_out(subject)
    listeners = [own for whose, own in subject.catalog.listeners if getattr(whose, "distribution", None) == subject.distribution]
    assume(listeners, "it does not implement quark_on_event")
    return listeners


@check("distribution")
def hears_every_event(subject: Subject) -> None:
    """The event hook accepts every kind of event, and unknown events, without raising."""
    for listener, event in product(_listeners(subject), _examples()):
        try:
            listener(event)
        except (Exception, SystemExit) as error:
            problem = f"{type(error).__name__}: {error}".rstrip(": ")
            raise CheckFailedError(f"raises {problem} for '{event.name}': a listener must ignore events that it does not need") from error


@check("distribution")
def prints_nothing_when_it_hears(subject: Subject) -> None:
    """The event hook writes nothing to stdout, since that would break ``--json``."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for listener, event in product(_listeners(subject), _examples()):
            listener(event)
    require(not printed.getvalue(), f"writes {printed.getvalue()[:80]!r} to stdout when it receives an event: use logging or stderr")


@check("distribution")
def hears_quickly(subject: Subject) -> None:
    """The event hook returns almost at once, since the run waits for the hook. Time that the hook sleeps
    counts too."""
    calls = list(product(_listeners(subject), _examples()))
    begin, waits = time.process_time(), dict.fromkeys(range(len(calls)), math.inf)
    for number, (listener, event) in list(enumerate(calls)) * _ROUNDS:
        called = time.perf_counter()
        listener(event)
        waits[number] = min(waits[number], time.perf_counter() - called)  # longer waits may come from a busy machine
    took = (time.process_time() - begin) / len(calls) / _ROUNDS
    fix = "hand the work to a thread, or do it at the end of the run"
    require(took <= MOST_SECONDS, f"takes {took:.3f} s of CPU time for an event, but at most {MOST_SECONDS} s is allowed: {fix}")
    wait = sum(waits.values()) / len(waits)
    require(wait <= MOST_SECONDS, f"makes a run wait {wait:.3f} s for an event, but at most {MOST_SECONDS} s is allowed: {fix}")


@check("distribution", since=2)
def changes_nothing_when_it_hears(subject: Subject) -> None:
    """The event hook changes no state that all code of the process shares, except the number of threads."""
    before = shared_state()
    for listener, event in product(_listeners(subject), _examples()):
        listener(event)
    changed = [name for name in changes(before, shared_state()) if name != "the number of threads"]
    require(not changed, f"changes {', '.join(changed[:3])} when it receives an event: all code of the process shares that state")
