"""``--json``: stdout has JSON alone, an event on each line and the result on the last.

An error before a run is a line too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quark.plugins import PhaseStarted
from quark.plugins.events import EVENTS, EVENTS_VERSION
from quark_tiny_model import held_out_text, tiny_model_dir
from quark_workbench.cli.main import main
from quark_workbench.commands.event_lines import EventLines


def printed(*arguments: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[dict[str, Any]]]:
    """Exit code, and the lines of stdout, which are JSON objects."""
    monkeypatch.setattr("sys.argv", ["quark", *map(str, arguments)])
    with pytest.raises(SystemExit) as done:
        main()
    return int(done.value.code or 0), [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_run_and_its_evaluation_and_report_are_lines_that_end_with_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(held_out_text()[:20_000], encoding="utf-8")
    out, model = tmp_path / "out", tiny_model_dir()
    calibration = ("--calib", tmp_path / "text.txt", "--num-calib", 2, "--seq-len", 64)
    commands = {
        "quantize": (model, out, "--scheme", "int4_wo_64", "--algorithm", "gptq", *calibration),
        "evaluate": (out, "--by-block", "--limit", 2, "--seq-len", 32),
        "report": (out, "--float", model),
    }
    for task, arguments in commands.items():
        code, lines = printed(task, *arguments, "--json", monkeypatch=monkeypatch, capsys=capsys)
        names = [line["event"] for line in lines]
        assert code == 0
        assert {line["version"] for line in lines} == {EVENTS_VERSION}
        assert set(names) <= {kind.name for kind in EVENTS} | {"result"}
        assert (names[0], names[-2:]) == ("run_started", ["run_finished", "result"])
        assert {line["task"] for line in lines[:-1]} == {task}
        assert [line["block"] for line in lines if line["event"] == "block_finished"] == [f"model.layers.{i}" for i in range(3)]
        assert [line["elapsed"] for line in lines[:-1]] == sorted(line["elapsed"] for line in lines[:-1])
    assert lines[-1]["out"] == str(out)


def test_an_error_before_a_run_is_a_line_and_a_plan_is_one_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("quantize", tmp_path / "nowhere", tmp_path / "out", "--scheme", "int4_wo_64", "--json")
    code, (line,) = printed(*arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert (code, line["event"], line["error"]) == (2, "run_failed", "CheckpointError")
    assert "there is no such directory" in line["message"]
    monkeypatch.setattr("sys.argv", ["quark", "quantize", str(tiny_model_dir()), "out", "--scheme", "mxfp4", "--dry-run", "--json"])
    with pytest.raises(SystemExit):
        main()
    assert "event" not in json.loads(capsys.readouterr().out)


def test_an_error_in_a_run_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("quantize", tiny_model_dir(), tmp_path / "out", "--scheme", "fp8", "--json")
    code, lines = printed(*arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 2
    assert [line["event"] for line in lines].count("run_failed") == 1
    assert (lines[-1]["event"], lines[-1]["error"]) == ("run_failed", "CalibrationError")


def test_of_the_phases_inside_blocks_one_a_second_is_printed() -> None:
    clock, lines = [0.0], list[str]()
    listener = EventLines(lines.append, lambda: clock[0])
    for at in range(100):
        clock[0] = at / 10
        listener(PhaseStarted(phase="solve" if at % 2 else "forward", block="model.layers.0"))
    assert len(lines) == 10
    listener(PhaseStarted(phase="write"))
    listener(PhaseStarted(phase="report"))
    assert len(lines) == 12
