"""Events reach every listener, and no listener can do harm."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from quark.plugins import BlockFinished, Catalog, Event, RunFailed, RunStarted, Source, emit, hookimpl, is_heard, listening, using
from quark.plugins.events import EVENTS, EVENTS_VERSION
from quark_workbench.cli.installed import plugins_report


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
        catalog.emit(RunStarted())
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
        catalog.emit(RunStarted())
    assert last.heard == ["run_started"]
    assert "leaving-quant 1.0 raised" in caplog.text


def test_a_listener_that_raises_is_told_of_once_and_each_listener_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    catalog = Catalog()
    catalog.add(Raising(), Source("noisy-quant", "1.0"))
    catalog.add(Leaving(), Source("leaving-quant", "1.0"))
    with caplog.at_level(logging.WARNING, "quark"):
        for _ in range(5):
            catalog.emit(BlockFinished())
    assert [r.getMessage().split(" raised")[0] for r in caplog.records] == ["noisy-quant 1.0", "leaving-quant 1.0"]


def test_a_listener_may_leave_the_event_out() -> None:
    catalog = Catalog()
    catalog.add(Incurious(), Source("a"))
    catalog.emit(RunStarted())
    assert Incurious.count == 1


def test_events_go_to_the_plugins_of_this_process(site: Any) -> None:
    listener = Listener()
    catalog = site.collect()
    catalog.add(listener, Source("a"))
    with using(catalog):
        emit(RunStarted())
    emit(RunStarted())
    assert listener.heard == ["run_started"]


def test_an_event_cannot_be_changed() -> None:
    phases = {"solve": 1.0}
    event = BlockFinished(block="a", phases=phases)
    phases["solve"] = 2.0
    assert event.phases["solve"] == 1
    with pytest.raises(TypeError):
        event.phases["solve"] = 3  # type: ignore[index]
    with pytest.raises(AttributeError):
        event.block = "b"  # type: ignore[misc]


def test_every_event_is_json_with_its_name_and_the_version() -> None:
    assert len({kind.name for kind in EVENTS}) == len(EVENTS)
    for kind in EVENTS:
        facts = json.loads(json.dumps(kind(task="quantize", elapsed=1.25).to_dict(), allow_nan=False))
        assert (facts["event"], facts["version"], facts["task"], facts["elapsed"]) == (kind.name, EVENTS_VERSION, "quantize", 1.25)


def test_numbers_that_json_lacks_are_null() -> None:
    event = BlockFinished(seconds=1 / 3, figures={"snr_db": float("inf"), "worst_snr_db": float("nan"), "layers": 2})
    assert event.to_dict()["figures"] == {"snr_db": None, "worst_snr_db": None, "layers": 2}
    assert event.to_dict()["seconds"] == 0.333333


def test_a_program_listens_as_plugins_do_and_only_inside_the_with_block(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Event] = []
    with using(Catalog()):
        assert not is_heard()
        with caplog.at_level(logging.WARNING, "quark"), listening(Raising().quark_on_event, "my bar"), listening(heard.append):
            assert is_heard()
            emit(RunFailed(message="first"))
            emit(RunFailed(message="second"))
        emit(RunFailed(message="third"))
    assert [event.message for event in heard if isinstance(event, RunFailed)] == ["first", "second"]
    assert [r.getMessage().split(" raised")[0] for r in caplog.records] == ["my bar"]


def test_a_plugin_that_listens_is_listed() -> None:
    catalog = Catalog()
    catalog.add(Listener(), Source("acme-quant", "1.0"))
    (row,) = [row for row in plugins_report(catalog)["plugins"] if row["distribution"] == "acme-quant"]
    assert row["provides"] == {"listeners": 1}


def test_a_plugin_that_only_measures_is_listed() -> None:
    class Measuring:
        @hookimpl
        def quark_measure(self, moment: object) -> None:
            pass

    catalog = Catalog()
    catalog.add(Measuring(), Source("acme-quant", "1.0"))
    (row,) = [row for row in plugins_report(catalog)["plugins"] if row["distribution"] == "acme-quant"]
    assert row["provides"] == {"measuring": 1}


def test_listings_do_not_make_the_classes_of_events() -> None:
    code = "import quark, sys; quark.schemes().names(); print('quark.plugins.events' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
