"""The matrix of versions: its cells cover what the packages claim, and only interpreters of the right version are taken."""

from __future__ import annotations

import re
import stat
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import yaml

from tools.docs import versions
from tools.matrix import __main__ as program
from tools.matrix import cells
from tools.matrix.cells import CELLS, ROOT, TESTS, Cell, Result, lowest
from tools.matrix.interpreters import interpreter

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def test_the_cells_have_the_lowest_versions_and_the_pinned_ones_on_the_newest_python() -> None:
    project = tomllib.loads((ROOT / "core/pyproject.toml").read_text(encoding="utf-8"))["project"]
    supported = [
        match[1] for text in project["classifiers"] if (match := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", text))
    ]
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), flags=re.MULTILINE))
    tested = {(cell.python, cell.torch, cell.transformers) for cell in CELLS}
    assert {cell.python for cell in CELLS} == set(supported)
    assert (supported[-1], pins["torch"], pins["transformers"]) in tested
    assert (supported[0], f"{lowest('torch')}.0", f"{lowest('transformers')}.0") in tested
    assert len({cell.name for cell in CELLS}) == len(CELLS)


def test_what_a_cell_runs_is_there() -> None:
    assert [path for path in TESTS if not (ROOT / path).exists()] == []


@pytest.fixture
def pyenv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of pyenv; nothing is on PATH but a folder beside it."""
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "pyenv"


def program_that(path: Path, says: str, status: int = 0) -> Path:
    """A program at that place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\nexit {status}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.posix("a shell script that is a program")
def test_an_interpreter_is_taken_if_it_starts_and_is_of_the_version(pyenv: Path, tmp_path: Path) -> None:
    assert interpreter("3.13") is None
    program_that(tmp_path / "bin/python3.13", "python3.13: command not found", 127)
    program_that(pyenv / "versions/3.13.1/bin/python3.13", "3.12")
    assert interpreter("3.13") is None
    right = program_that(pyenv / "versions/3.13.0/bin/python3.13", "3.13")
    assert interpreter("3.13") == right
    assert interpreter("3.1") is None


def test_a_cell_without_an_interpreter_is_passed_over_and_said_so(
    pyenv: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "has_torch", lambda *_: pytest.fail("an environment was made"))
    assert program.main(["3.13"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [f"{c.name}: {c.why}, skipped: no python3.13 is on PATH or in pyenv" for c in CELLS if c.python == "3.13"]


def test_an_unknown_version_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["3.13", "9.9"])
    assert "no cell has 9.9" in capsys.readouterr().err


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cell:
    """The one cell of a matrix, of this interpreter, whose results are kept elsewhere."""
    cell = Cell(HERE, "2.8.0", "5.4.0", "nobody")
    monkeypatch.setattr(program, "CELLS", (cell,))
    monkeypatch.setattr(versions, "CELLS", (cell,))
    monkeypatch.setattr(program, "ROOT", tmp_path)
    monkeypatch.setattr(program, "interpreter", lambda _: Path(sys.executable))
    monkeypatch.setattr(cells, "RESULTS", tmp_path / "versions.json")
    return cell


@pytest.mark.parametrize(("result", "status"), [({}, 0), ({"failed": 1}, 1), ({"demo": False}, 1)])
def test_a_result_is_kept_and_shown_and_the_environment_removed(
    result: dict[str, int | bool], status: int, cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = attrs.evolve(Result("abc", {"torch": "2.8.0"}, demo=True, passed=1234, failed=0, skipped=5, minutes=3.0), **result)
    monkeypatch.setattr(program, "has_torch", lambda cell, python, place: place.mkdir() is None)
    monkeypatch.setattr(program, "environment", lambda cell, place: place / "bin/python")
    monkeypatch.setattr(program, "run", lambda python, workers, *, few: measured)
    assert "not run" in versions.table()
    assert program.main(["--few"]) == status
    assert cells.read() == {}
    assert program.main([]) == status
    assert cells.read() == {cell.name: measured}
    demo = "yes" if measured.demo else "no"
    assert f"| {HERE} | 2.8.0 | 5.4.0 | nobody | {demo} | 1,234 | {measured.failed} | 5 |" in versions.table()
    assert not (tmp_path / f".venv-matrix-{cell.name}").exists()


@pytest.mark.parametrize("few", [False, True])
def test_a_cell_runs_the_selection_if_it_is_asked_for(few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def record(command: list[Any], **_: Any) -> SimpleNamespace:
        commands.append([str(word) for word in command])
        for word in commands[-1]:
            if word.startswith("--junitxml="):
                report = '<testsuites><testsuite tests="9" failures="1" errors="1" skipped="2"/></testsuites>'
                Path(word.partition("=")[2]).write_text(report, encoding="utf-8")
        return SimpleNamespace(returncode=0, stdout='{"torch": "2.8.0"}', stderr="")

    monkeypatch.setattr(program.subprocess, "run", record)
    result = program.run(Path(sys.executable), "2", few=few)
    assert (result.passed, result.failed, result.skipped) == (5, 2, 2)
    assert ["--few" in command for command in commands if "pytest" in command] == [few]


def test_a_torch_that_cannot_be_installed_is_an_error_unless_cells_are_run_if_possible(
    cell: Cell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "has_torch", lambda *_: False)
    monkeypatch.setattr(program, "environment", lambda *_: (_ for _ in ()).throw(OSError("no torch")))
    assert program.main(["--if-possible"]) == 0
    assert f"torch 2.8.0 cannot be installed for Python {HERE}" in capsys.readouterr().out
    with pytest.raises(OSError, match="no torch"):
        program.main([])


def test_the_workflow_runs_the_cells_that_no_other_job_does() -> None:
    job = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]["versions"]
    named = {tuple(entry[key] for key in ("python", "torch", "transformers")) for entry in job["strategy"]["matrix"]["include"]}
    assert named == {(cell.python, cell.torch, cell.transformers) for cell in CELLS if cell.why != "development"}
