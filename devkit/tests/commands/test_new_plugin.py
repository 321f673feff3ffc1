"""``quark new-plugin``: each option writes the kind of its name; an error is one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from quark_devkit.new_plugin import PLUGIN_KINDS
from quark_workbench.cli.main import main, program


def said(*arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and output of the program."""
    monkeypatch.setattr("sys.argv", ["quark", "new-plugin", *arguments])
    with pytest.raises(SystemExit) as done:
        main()
    captured = capsys.readouterr()
    return int(done.value.code or 0), captured.out + captured.err


@pytest.mark.parametrize("kind", PLUGIN_KINDS, ids=lambda kind: kind.name)
def test_each_option_writes_its_kind(kind: object, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(program(), ["new-plugin", "acme-quant", kind.option, "--directory", str(out)])  # type: ignore[attr-defined]
    assert result.exit_code == 0, result.output
    assert f"Wrote {out}" in result.output
    assert kind.conformance in (out / "tests" / "test_conformance.py").read_text(encoding="utf-8")  # type: ignore[attr-defined]


def test_every_kind_has_its_option_in_the_help() -> None:
    output = CliRunner().invoke(program(), ["new-plugin", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    assert all(kind.option in output for kind in PLUGIN_KINDS)


def test_by_default_it_writes_into_a_directory_of_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text = said("Acme_Quant", "--scheme", "--format", monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0
    assert "cd acme-quant" in text
    assert (tmp_path / "acme-quant" / "src" / "acme_quant" / "int3.py").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["acme-quant"], "nothing to write: choose at least one of --scheme, --format"),
        (["acme quant", "--scheme"], "is not a distribution name"),
        (["torch", "--scheme"], "is another package"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text = said(*arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 2
    assert message in text
    assert "Traceback" not in text
    assert not list(tmp_path.iterdir())


def test_a_directory_in_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "acme-quant").mkdir()
    (tmp_path / "acme-quant" / "mine").write_text("mine")
    monkeypatch.chdir(tmp_path)
    code, text = said("acme-quant", "--scheme", monkeypatch=monkeypatch, capsys=capsys)
    assert code == 2
    assert "the directory 'acme-quant' is not empty" in text
