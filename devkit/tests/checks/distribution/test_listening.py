"""Checks of listeners hand every event to those of the distribution."""

from __future__ import annotations

from quark.plugins import Event, hookimpl
from quark.plugins.events import EVENTS
from quark_devkit import run_check
from quark_devkit.checks.distribution.listening import hears_every_event

from ...mutants.mutant import subject_among


def test_hears_every_event_passes_a_listener_that_it_hands_every_kind_and_one_of_a_later_version() -> None:
    heard: list[str] = []

    class Listening:
        @hookimpl
        def quark_on_event(self, event: Event) -> None:
            heard.append(event.name)

    result = run_check(subject_among("distribution", (), Listening()), hears_every_event)
    assert result.outcome == "passed", result.message
    assert heard == [*(kind.name for kind in EVENTS), "event_of_a_later_version"]
