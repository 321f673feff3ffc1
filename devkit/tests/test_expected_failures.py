"""Expected failures come from the author's pyproject.toml, with reasons, and name existing checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from quark.errors import ConfigError
from quark_devkit.expected_failures import expected_failures, find_pyproject, refuse_unknown

HEAD = '[project]\nname = "Acme_Quant"\n'
TABLE = "[tool.quark.conformance.expected-failures]\n"


def write(directory: Path, text: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "pyproject.toml").write_text(text, encoding="utf-8")
    return directory / "pyproject.toml"


def test_the_file_is_found_above_the_tests_by_the_name_of_the_project(tmp_path: Path) -> None:
    file = write(tmp_path, HEAD)
    write(tmp_path / "tests", '[project]\nname = "another"\n')
    assert find_pyproject("acme-quant", tmp_path / "tests") == file
    assert find_pyproject("nobody-has-this", tmp_path / "tests") is None


def test_an_editable_installation_leads_to_its_file(tmp_path: Path) -> None:
    file = find_pyproject("quark-core", tmp_path)
    assert file is None or 'name = "quark-core"' in file.read_text(encoding="utf-8")


def test_reasons_are_read_by_id(tmp_path: Path) -> None:
    file = write(tmp_path, HEAD + TABLE + '"format:acme:saturates" = "wraps around"\n')
    assert expected_failures(file) == {"format:acme:saturates": "wraps around"}
    assert expected_failures(write(tmp_path, HEAD)) == {}
    assert expected_failures(None) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TABLE + '"format:acme:saturates" = " "', "has no reason"),
        (TABLE + '"format:acme:saturates" = 3', "has no reason"),
        ("[tool.quark.conformance]\nexpected-failures = 3", "is not a table"),
        ("[tool", "cannot be read"),
    ],
)
def test_a_table_of_another_form_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        expected_failures(write(tmp_path, text))


def test_an_entry_that_names_no_check_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'format:acme:saturate' names no check.*did you mean 'format:acme:saturates'\?"):
        refuse_unknown({"format:acme:saturate": "x"}, ["format:acme:saturates"])
    refuse_unknown({"format:acme:saturates": "x"}, ["format:acme:saturates"])
