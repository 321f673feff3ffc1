"""``quark plan``: the options of ``quark quantize``, and what that prints with ``--dry-run``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from quark_tiny_model import tiny_model_dir
from quark_workbench.cli.commands import typer_command
from tests.integration.program import run

OPTIONS = ("--scheme", "int4_wo_64", "--algorithm", "gptq", "--no-probe")


def test_the_options_are_those_of_quantize() -> None:
    commands = {name: typer_command(name) for name in ("plan", "quantize")}
    names = {command: {p.name for p in commands[command].params} for command in ("plan", "quantize")}
    writing = {"out", "dry_run", "resume", "restart", "report", "no_report", "deterministic"}
    selection = {"mixed", "target_bits", "target_size", "kl_budget", "selector", "selector_option", "runtime", "curve"}
    assert names["quantize"] - names["plan"] == writing | selection
    assert names["plan"] <= names["quantize"]


def test_a_dry_run_prints_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", tiny_model_dir(), *OPTIONS, monkeypatch=monkeypatch) == 0
    planned = capsys.readouterr().out
    assert run("quantize", tiny_model_dir(), tmp_path / "out", *OPTIONS, "--dry-run", monkeypatch=monkeypatch) == 0
    dry = capsys.readouterr().out

    def without_memory(text: str) -> list[str]:
        return [line for line in text.splitlines() if not line.startswith("  memory:")]  # it holds the size of this process

    assert without_memory(planned) == without_memory(dry)
    assert "21 of 23 layers get a quantized weight" in planned
    assert "4.562 bits per quantized weight" in planned
    assert not list(tmp_path.iterdir())


def test_what_refuses_a_run_is_told_after_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = Path(shutil.copytree(tiny_model_dir(), tmp_path / "in"))
    (directory / "model.safetensors").write_bytes(b"")
    more = ("--calib", tmp_path / "nowhere.txt", "--device", "toaster", "--json")
    assert run("plan", directory, *OPTIONS, *more, monkeypatch=monkeypatch) == 2
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert len(found["rows"]) == 23
    assert [r["kind"] for r in found["refusals"]] == ["CalibrationError", "ConfigError", "CheckpointError"]
    assert "this run would be refused, for 3 reasons:" in printed.err
    assert all(word in printed.err for word in ("nowhere.txt", "toaster", "is truncated"))


def test_one_reason_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("x")
    assert run("quantize", tiny_model_dir(), tmp_path / "out", *OPTIONS, "--dry-run", monkeypatch=monkeypatch) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith(f"quark: the output directory '{tmp_path / 'out'}' is not empty")
