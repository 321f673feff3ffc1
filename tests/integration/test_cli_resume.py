"""`quark quantize --resume`, `--restart` and `--max-shard-size`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quark_devkit.whole_runs import interrupted_behind

from .interrupted import files
from .program import run


def command(source: Path, out: Path, *more: str) -> tuple[object, ...]:
    return ("quantize", source, out, "--scheme", "int4_wo_32", "--no-report", *more)


def test_an_interrupted_command_is_refused_resumed_or_started_again(
    source: Path, tmp_path: Path, quantized: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*command(source, tmp_path / "once"), monkeypatch=monkeypatch) == 0
    for option, blocks in (("--resume", 1), ("--restart", 3)):
        out = tmp_path / option
        monkeypatch.setattr("sys.argv", ["quark", *map(str, command(source, out))])
        with interrupted_behind(2):
            _main()
        capsys.readouterr()
        assert run(*command(source, out), monkeypatch=monkeypatch) == 2
        said = capsys.readouterr().err
        assert "2 finished blocks" in said
        assert "--resume" in said
        assert "--restart" in said
        quantized.clear()
        assert run(*command(source, out, option), monkeypatch=monkeypatch) == 0
        assert len(quantized) == blocks
        assert files(out) == files(tmp_path / "once")


def _main() -> Any:
    from quark_workbench.cli.main import program

    return program()(standalone_mode=False)


def test_both_options_are_a_contradiction(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*command(source, tmp_path / "out", "--resume", "--restart"), monkeypatch=monkeypatch) == 2
    assert "Set only one of the two" in capsys.readouterr().err


def test_the_size_of_files_is_given_as_people_write_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*command(source, tmp_path / "out", "--max-shard-size", "40kB"), monkeypatch=monkeypatch) == 0
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 1
    assert all(shard.stat().st_size < 60_000 for shard in shards)
    for wrong, says in ((("--max-shard-size", "big"), "such as 5GB"), (("--max-shard-size", "0"), "--max-shard-size")):
        assert run(*command(source, tmp_path / "another", *wrong), monkeypatch=monkeypatch) == 2
        assert says in capsys.readouterr().err


def test_a_command_that_is_finished_already_says_so_and_succeeds(
    source: Path,
    tmp_path: Path,
    quantized: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    out = tmp_path / "out"
    assert run(*command(source, out), monkeypatch=monkeypatch) == 0
    before = files(out)
    quantized.clear()
    capsys.readouterr()
    assert run(*command(source, out, "--resume"), monkeypatch=monkeypatch) == 0
    assert f"'{out}' is complete: an earlier run with the same settings has written it" in caplog.text
    assert f"{out}: 21 layers in int4_wo_32" in capsys.readouterr().out
    assert quantized == []
    assert files(out) == before
    assert run(*command(source, out), monkeypatch=monkeypatch) == 2
    assert "is not empty" in capsys.readouterr().err


def test_what_another_command_has_finished_is_refused_and_the_difference_is_named(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(*command(source, out), monkeypatch=monkeypatch) == 0
    before = files(out)
    capsys.readouterr()
    assert run("quantize", source, out, "--scheme", "int4_wo_64", "--no-report", "--resume", monkeypatch=monkeypatch) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"the run that has written '{out}' differs from this run: settings.configuration" in told
    assert "choose another output directory" in told.lower()
    assert files(out) == before
    (out / "model.safetensors").unlink()
    assert run(*command(source, out, "--resume"), monkeypatch=monkeypatch) == 2
    assert "but files have changed since ('model.safetensors' is missing)" in capsys.readouterr().err
