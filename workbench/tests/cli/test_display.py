"""The display of a run: lines in the log, and a bar where quark itself writes its log to a terminal."""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from rich.console import Console

from quark.base.log import get_logger
from quark.plugins import BatchFinished, BlockFinished, BlockStarted, Event, PhaseStarted, RunFinished, RunPlanned, RunStarted
from quark.plugins.run_events import RunEvents, running
from quark_workbench.cli.display import Bar, LogLines, display, duration

get_logger()  # has its level before caplog changes it and puts it back


LONG = " and".join(["a line of the log that is longer than the terminal is wide, and stays one line"] * 3)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def unconfigured() -> Iterator[None]:
    """The root logger without the handlers that pytest gives it: the application has configured nothing."""
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        yield
    finally:
        root.handlers = handlers


def lines(events: list[tuple[float, Event]], caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log messages of events, each at its second."""
    clock = [0.0]
    listener = LogLines(lambda: clock[0])
    with caplog.at_level(logging.INFO, "quark"):
        for at, event in events:
            clock[0] = at
            listener(event)
    return caplog.messages


def test_lines_come_now_and_then_with_the_time_left(caplog: pytest.LogCaptureFixture) -> None:
    block = [BlockFinished(task="quantize", number=n, total=30, seconds_left=3.1 * (30 - n)) for n in range(1, 31)]
    events: list[tuple[float, Event]] = [(0, RunPlanned(task="quantize", samples=128)), (0, PhaseStarted(phase="data"))]
    events += [(3.1 * event.number, event) for event in block]
    said = lines([*events, (94, RunFinished(task="quantize"))], caplog)
    assert said[:3] == [
        "Calibrating with 128 forward pass(es), one block at a time.",
        "Reading calibration data.",
        "Quantized 2 of 30 blocks, about 1 min 27 s left.",
    ]
    assert said[-2:] == ["Quantized 30 of 30 blocks.", "Model quantization has been completed."]
    assert len(said) == 2 + 15 + 1


def test_evaluations_are_counted_in_batches_of_a_number_that_may_not_be_known(caplog: pytest.LogCaptureFixture) -> None:
    events: list[tuple[float, Event]] = [
        (6, BatchFinished(task="evaluate", number=3, total=9, seconds_left=7200.0)),
        (20, BatchFinished(task="evaluate", number=4)),
        (21, RunFinished(task="evaluate")),
    ]
    assert lines(events, caplog) == ["Evaluated 3 of 9 batches, about 2 h 0 min left.", "Evaluated 4 batches."]


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 0 s"), (3599, "59 min 59 s"), (3600, "1 h 0 min")])
def test_durations_are_those_of_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_bar_says_where_the_run_is_how_far_and_how_long_it_takes() -> None:
    terminal, clock = Terminal(), [100.0]
    bar = Bar(Console(file=terminal, force_terminal=True, width=120, color_system=None), lambda: clock[0])
    row = bar._progress.tasks[0]
    bar(RunStarted(task="quantize"))
    bar(PhaseStarted(task="quantize", phase="plan"))
    assert (row.description, row.total, str(row.fields["left"])) == ("Quantizing: planning", None, "")
    bar(BlockStarted(task="quantize", block="model.layers.3", number=4, total=30))
    bar(PhaseStarted(task="quantize", phase="solve", block="model.layers.3"))
    assert (row.description, row.completed, row.total) == ("Quantizing model.layers.3: solve", 3, 30)
    bar(BlockFinished(task="quantize", block="model.layers.3", number=4, total=30, seconds_left=95.0))
    clock[0] += 5
    assert (row.completed, str(row.fields["left"]), row.fields["count"]) == (4, "1 min 30 s left", "4/30")
    bar(BlockStarted(task="quantize", block="model.layers.4", number=5, total=30))
    assert str(row.fields["left"]) == "1 min 30 s left"
    bar(PhaseStarted(task="quantize", phase="report"))
    assert str(row.fields["left"]) == ""
    bar.close()
    assert "Quantizing: making the report" in terminal.getvalue()


def test_the_first_block_of_a_second_pass_takes_the_time_left_of_the_first_pass_away() -> None:
    bar = Bar(Console(file=Terminal()), lambda: 0.0)
    left = bar._progress.tasks[0].fields["left"]
    bar(BlockFinished(task="select", block="a", number=2, total=2, seconds_left=95.0))
    assert str(left) == "1 min 35 s left"
    bar(BlockStarted(task="quantize", block="a", number=1, total=2))
    assert str(left) == ""
    bar.close()


def test_a_name_in_a_checkpoint_cannot_command_the_terminal() -> None:
    bar = Bar(Console(file=Terminal(), force_terminal=True))
    bar(BlockStarted(task="quantize", block="a\x1b[2J[red]", number=1, total=1))
    bar.close()
    assert "\x1b" not in bar._progress.tasks[0].description


def test_short_evaluations_draw_nothing() -> None:
    terminal = Terminal()
    bar = Bar(Console(file=terminal, force_terminal=True))
    bar(RunStarted(task="evaluate", elapsed=0.0))
    bar(BatchFinished(task="evaluate", elapsed=0.1, number=1, total=1))
    assert terminal.getvalue() == ""
    bar(BatchFinished(task="evaluate", elapsed=0.6, number=1, total=1))
    bar.close()
    assert "Evaluating" in terminal.getvalue()


def of_a_run() -> None:
    with running("quantize") as events:
        _two_blocks(events)


def _two_blocks(events: RunEvents) -> None:
    events.expect([1, 1])
    for number in range(2):
        events.block_started(f"model.layers.{number}", number)
        events.block_finished()
    get_logger("quark.runs").warning(LONG)


def test_on_a_terminal_there_is_a_bar_and_other_lines_stay_whole_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with unconfigured():
        of_a_run()
    drawn = terminal.getvalue()
    assert "Quantizing" in drawn
    assert f"[QUARK-WARNING]: {LONG}" in drawn
    assert "completed" not in drawn  # the bar stands for the lines of the run
    assert sys.stderr is terminal


def test_elsewhere_there_are_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    with unconfigured():
        of_a_run()
    said = file.getvalue().splitlines()
    assert [line.partition(":")[0] for line in said] == ["[QUARK-WARNING]", "[QUARK-INFO]"]
    assert said[-1] == "[QUARK-INFO]: Model quantization has been completed."


def test_an_application_that_configures_logging_gets_lines_and_no_bar(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with caplog.at_level(logging.INFO):
        of_a_run()
    assert terminal.getvalue() == ""
    assert caplog.messages[-1] == "Model quantization has been completed."


def test_without_info_there_is_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    before = get_logger().level
    get_logger().setLevel(logging.ERROR)
    try:
        with unconfigured():
            of_a_run()
    finally:
        get_logger().setLevel(before)
    assert terminal.getvalue() == ""


def test_the_runs_of_two_threads_are_shown_apart_and_the_end_of_one_leaves_the_other(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "quark"), running("quantize"):
        thread = threading.Thread(target=of_a_run)
        thread.start()
        thread.join()
    assert caplog.messages == [LONG, *["Model quantization has been completed."] * 2]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_run_that_fails_takes_its_bar_away(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with unconfigured(), pytest.raises(error), running("quantize"):
        raise error
    drawn = terminal.getvalue()
    with unconfigured():
        get_logger("quark.runs").warning("after the run")
    assert terminal.getvalue() == f"{drawn}[QUARK-WARNING]: after the run\n"


def test_events_of_a_run_that_was_not_heard_to_begin_show_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "quark"):
        display(RunFinished(task="quantize"))
    assert caplog.messages == []
