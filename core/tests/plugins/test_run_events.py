"""Events of a run: beginning, end and time left; they cost nothing without listeners."""

from __future__ import annotations

import logging
import math
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from quark.base.log import get_logger
from quark.models.plan.decoder_blocks import Block
from quark.plugins import BatchFinished, BlockFinished, Catalog, Event, Exported, PhaseStarted, RunFailed, Warned, listening, using
from quark.plugins.run_events import SILENT, RunEvents, TimeLeft, running


def names(heard: list[Event]) -> list[str]:
    return [event.name for event in heard]


def test_a_run_ends_well_or_by_an_error_and_never_by_both() -> None:
    heard: list[Event] = []
    with listening(heard.append):
        with running("quantize", source="a", scheme="fp8"):
            pass
        with pytest.raises(KeyboardInterrupt), running("evaluate"):
            raise KeyboardInterrupt
    assert names(heard) == ["run_started", "run_finished", "run_started", "run_failed"]
    assert (heard[-1].error, heard[-1].task) == ("KeyboardInterrupt", "evaluate")  # type: ignore[attr-defined]


def test_a_run_inside_another_is_silent_and_one_in_another_thread_is_not() -> None:
    heard: list[Event] = []

    def other() -> None:
        with running("report"):
            pass

    with listening(heard.append), running("select"), running("evaluate") as inner:
        inner.phase("evaluate")
        assert inner is SILENT
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert [(event.name, event.task) for event in heard] == [
        ("run_started", "select"),
        ("run_started", "report"),
        ("run_finished", "report"),
        ("run_finished", "select"),
    ]


def test_of_several_processes_only_the_first_speaks() -> None:
    heard: list[Event] = []
    with listening(heard.append), running("quantize", speaks=False) as events:
        events.phase("plan")
        get_logger("quark.runs").error("of another rank")
        events.exported(Path("nowhere"), "safetensors")
    assert heard == []


def test_what_is_logged_as_a_warning_is_heard_and_a_users_handler_gets_it_too(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Event] = []
    with listening(heard.append), running("quantize"):
        get_logger("quark.runs.somewhere").warning("few tokens: %d", 3)
        get_logger("quark.runs.somewhere").info("nothing to worry about")
    get_logger().warning("after the run")
    (warning,) = [event for event in heard if isinstance(event, Warned)]
    assert (warning.message, warning.level, warning.logger) == ("few tokens: 3", "WARNING", "quark.runs.somewhere")
    assert "few tokens: 3" in caplog.messages


def test_a_listener_that_raises_is_told_of_once_to_the_others_and_the_run_goes_on() -> None:
    heard: list[Event] = []

    def broken(event: Event) -> None:
        raise RuntimeError("no bar")

    with listening(broken, "my bar"), listening(heard.append), running("quantize") as events:
        events.phase("plan")
        events.phase("data")
    assert names(heard).count("warning") == 1
    assert names(heard)[-1] == "run_finished"


def test_a_phase_is_told_where_it_changes() -> None:
    heard: list[Event] = []
    events = RunEvents("quantize")
    events.expect([1])
    with listening(heard.append):
        events.phase("load")
        events.phase("load")
        events.block_started("a", 0)
        events.phase("load")
        events.block_finished()
        events.phase("write")
    phases = [(event.phase, event.block) for event in heard if isinstance(event, PhaseStarted)]
    assert phases == [("load", None), ("load", "a"), ("write", None)]


def test_the_time_left_goes_by_the_size_of_blocks() -> None:
    times = iter([0.0, 10.0, 10.0, 13.0, 13.0, 19.0])
    events, heard = RunEvents("quantize", now=lambda: next(times)), list[Event]()
    events.expect([30, 60])
    with using(Catalog()):
        events.block_started("a", 0)  # at 10; times are read even where nobody listens
        events._now = lambda: 13.0
        with listening(heard.append):
            events.block_finished(figures={"layers": 7})
    (event,) = heard
    assert isinstance(event, BlockFinished)
    assert (event.block, event.number, event.total, event.seconds, event.seconds_left) == ("a", 1, 2, 3.0, 6.0)
    assert event.figures == {"layers": 7}


def test_blocks_and_batches_are_counted_as_they_are_worked_on() -> None:
    heard: list[Event] = []
    events = RunEvents("evaluate")
    with listening(heard.append):
        assert [b.name for b in events.blocks([Block("a", nn.Linear(2, 2)), Block("", nn.Linear(2, 2))])] == ["a", ""]
        assert list(events.batches(iter([5, 6]), of=[5, 6])) == [5, 6]
        assert list(events.batches(iter([5]), of=iter([5]))) == [5]
        assert list(events.batches(iter([5, 6, 7]), of=[5])) == [5, 6, 7]
    blocks = [(e.block, e.number, e.total) for e in heard if isinstance(e, BlockFinished)]
    assert blocks == [("a", 1, 2), ("model", 2, 2)]
    assert [(e.number, e.total) for e in heard if isinstance(e, BatchFinished)] == [(1, 2), (2, 2), (1, None), (1, 1), (2, 2), (3, 3)]


def test_an_export_is_told_with_its_size(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.bin").write_bytes(b"12345")
    (tmp_path / "sub" / "b.bin").write_bytes(b"123")
    heard: list[Event] = []
    with listening(heard.append):
        RunEvents("export").exported(tmp_path, "box")
    (event,) = heard
    assert isinstance(event, Exported)
    assert (event.bytes, event.files, event.exporter) == (8, 2, "box")


def test_where_nobody_listens_no_event_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr("quark.plugins.run_events.emit", made.append)
    with using(Catalog()), running("quantize") as events:
        events.phase("plan")
        events.expect([1])
        events.block_started("a", 0)
        events.block_finished(figures={"layers": 7})
    assert made == []


def test_the_core_alone_shows_nothing_but_warnings(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    with caplog.at_level(logging.DEBUG, "quark"), using(Catalog()), running("quantize") as events:
        events.phase("data")
        get_logger("quark.runs").warning("few tokens")
    assert caplog.messages == ["few tokens"]
    assert capsys.readouterr() == ("", "")


def test_an_error_says_what_it_is() -> None:
    heard: list[Event] = []
    with listening(heard.append), pytest.raises(ValueError, match="bad"), running("quantize"):
        raise ValueError("bad")
    assert isinstance(heard[-1], RunFailed)
    assert (heard[-1].error, heard[-1].message) == ("ValueError", "bad")


@given(st.lists(st.floats(0.5, 1e6), min_size=1, max_size=20), st.floats(1e-3, 1e3))
def test_at_a_steady_rate_the_time_left_is_right_after_every_piece(work: list[float], rate: float) -> None:
    left = TimeLeft(work)
    assert left.seconds is None
    for number, one in enumerate(work):
        left.finish(number, one / rate)
        assert left.seconds == pytest.approx(math.fsum(work[number + 1 :]) / rate, rel=1e-9, abs=1e-9 * math.fsum(work) / rate)


def test_pieces_without_work_say_nothing_of_the_rate() -> None:
    left = TimeLeft([0, 4, 0, 8])
    left.finish(0, seconds=100.0)
    assert left.seconds is None
    left.finish(1, seconds=2.0)
    left.finish(2, seconds=100.0)
    assert left.seconds == 4.0
