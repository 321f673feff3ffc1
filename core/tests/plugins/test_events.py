"""Events reach every listener, and no listener can do harm."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from quark.plugins import Catalog, Event, Source, emit, hookimpl, using


class Listener:
    def __init__(self) -> None:
        self.heard: list[str] = []

    @hookimpl
    def quark_on_event(self, event: Event) -> None:
        self.heard.append(event.name)


class Raising:
    @hookimpl
    def quark_on_event(self, event: Event) -> None:
        raise RuntimeError("no bar")


class Incurious:
    count = 0

    @hookimpl
    def quark_on_event(self) -> None:
        type(self).count += 1


def test_all_hear_although_one_raises_and_the_log_says_who(caplog: pytest.LogCaptureFixture) -> None:
    catalog, first, last = Catalog(), Listener(), Listener()
    for plugin, name in ((first, "a"), (Raising(), "noisy-quant"), (last, "z")):
        catalog.add(plugin, Source(name, "1.0"))
    with caplog.at_level(logging.WARNING, "quark"):
        catalog.emit(Event("run_started"))
    assert (first.heard, last.heard) == (["run_started"], ["run_started"])
    assert "noisy-quant 1.0 raised in quark_on_event for 'run_started'" in caplog.text
    assert "no bar" in caplog.text


class Leaving:
    @hookimpl
    def quark_on_event(self, event: Event) -> None:
        raise SystemExit(3)


def test_a_listener_that_exits_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    catalog, last = Catalog(), Listener()
    catalog.add(Leaving(), Source("leaving-quant", "1.0"))
    catalog.add(last, Source("z"))
    with caplog.at_level(logging.WARNING, "quark"):
        catalog.emit(Event("run_started"))
    assert last.heard == ["run_started"]
    assert "leaving-quant 1.0 raised" in caplog.text


def test_a_listener_that_raises_is_told_of_once_and_each_listener_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    catalog = Catalog()
    catalog.add(Raising(), Source("noisy-quant", "1.0"))
    catalog.add(Leaving(), Source("leaving-quant", "1.0"))
    with caplog.at_level(logging.WARNING, "quark"):
        for _ in range(5):
            catalog.emit(Event("block_finished"))
    assert [r.getMessage().split(" raised")[0] for r in caplog.records] == ["noisy-quant 1.0", "leaving-quant 1.0"]


def test_a_listener_may_leave_the_event_out() -> None:
    catalog = Catalog()
    catalog.add(Incurious(), Source("a"))
    catalog.emit(Event("x"))
    assert Incurious.count == 1


def test_events_go_to_the_plugins_of_this_process(site: Any) -> None:
    listener = Listener()
    catalog = site.collect()
    catalog.add(listener, Source("a"))
    with using(catalog):
        emit(Event("inside"))
    emit(Event("outside"))
    assert listener.heard == ["inside"]


def test_an_event_cannot_be_changed() -> None:
    payload = {"done": 1}
    event = Event("x", payload)
    payload["done"] = 2
    assert event.payload["done"] == 1
    with pytest.raises(TypeError):
        event.payload["done"] = 3  # type: ignore[index]
