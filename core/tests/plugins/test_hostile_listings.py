"""Listings of hostile plugins or very many records are complete, intact and quick."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from quark.base.log import unprintable
from quark.plugins import using
from quark.plugins.collection import MOST_RECORDS
from quark_workbench.cli import listing
from quark_workbench.cli.main import main

HOSTILE = r"""
    from quark.plugins import ExporterRecord, Option

    TEXT = "[red]4 bits[/] \x1b[2J\x1b]0;title\x07 \u202e<script>\n\rquark: all is well"

    @hookimpl
    def quark_register_schemes():
        yield scheme("hostile", summary=TEXT, clients=(TEXT,))

    @hookimpl
    def quark_register_exporters():
        yield ExporterRecord(name="hostile", summary=TEXT, exporter="json:dumps", options=[Option("level", "int", TEXT, TEXT)])

    @hookimpl
    def quark_register_formats():
        raise ValueError(TEXT)
"""
MANY = """
    @hookimpl
    def quark_register_schemes():
        for i in range(10_000):
            yield scheme(f"many_{i}")
"""

ENDLESS = """
    from itertools import count

    @hookimpl
    def quark_register_schemes():
        for i in count():
            yield scheme(f"many_{i}")
"""


def printed(catalog: Any, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with using(catalog):
        assert listing.answer(arguments)
    return capsys.readouterr().out


@pytest.fixture
def hostile(site: Any) -> Any:
    site.install("hostile-quant", HOSTILE)
    return site.collect()


@pytest.mark.parametrize("arguments", [["schemes"], ["schemes", "hostile"], ["exporters"], ["formats"], ["plugins"]], ids=" ".join)
@pytest.mark.parametrize("is_terminal", [False, True])
def test_what_a_terminal_would_obey_is_written_out(
    arguments: list[str], is_terminal: bool, hostile: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    text = printed(hostile, capsys, *arguments)
    assert [line for line in text.split("\n") if unprintable(line) is not None] == []
    assert not any(line.startswith("quark: all is well") for line in text.split("\n"))
    if not is_terminal:
        assert "\\x1b[2J" in text, "it is shown, not left out"
        assert "[red]4 bits[/]" in text, "markup is text like any other"


@pytest.mark.parametrize("arguments", [["schemes"], ["exporters"], ["formats"], ["plugins"]], ids=" ".join)
def test_json_holds_the_texts_as_they_are_and_no_control_character(
    arguments: list[str], hostile: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(hostile, capsys, *arguments, "--json")
    assert text.isascii()
    assert [line for line in text.split("\n") if unprintable(line) is not None] == []
    assert "\x1b[2J" in json.dumps(json.loads(text), ensure_ascii=False).encode().decode("unicode_escape")


def test_an_error_that_quotes_a_plugin_is_written_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(arguments: object) -> bool:
        raise RuntimeError("a plugin said \x1b[2J")

    monkeypatch.setattr(listing, "answer", fails)
    monkeypatch.setattr("sys.argv", ["quark", "schemes"])
    with pytest.raises(SystemExit):
        main()
    assert r"a plugin said \x1b[2J" in capsys.readouterr().err


def test_ten_thousand_records_are_listed_soon(site: Any, capsys: pytest.CaptureFixture[str]) -> None:
    site.install("many-quant", MANY)
    site.install("more-quant", MANY)  # the same names: each of them is contested
    begin = time.process_time()
    catalog = site.collect()
    text = printed(catalog, capsys, "schemes")
    seconds = time.process_time() - begin
    assert len(text.splitlines()) > 3 * MOST_RECORDS, "a row for each, and a line for each name that both claim"
    assert seconds < 20, "each record costs the same, however many there are"


def test_records_without_end_are_cut_off_and_the_plugin_is_named(site: Any, capsys: pytest.CaptureFixture[str]) -> None:
    site.install("endless-quant", ENDLESS)
    text = printed(site.collect(), capsys, "schemes")
    assert f"yields more than {MOST_RECORDS} records: the rest is left out" in text
    assert "endless-quant" in text


@pytest.mark.parametrize("does", ["print('hello')", "raise GeneratorExit('bye')"])
def test_the_function_of_a_record_spoils_no_listing(does: str, site: Any, capsys: pytest.CaptureFixture[str]) -> None:
    record = "SchemeRecord(name='loud', config=f'{__name__}:config')"
    code = f"def config():\n    {does}\n\n@hookimpl\ndef quark_register_schemes():\n    yield {record}\n"
    site.install("loud-quant", code)
    report = json.loads(printed(site.collect(), capsys, "schemes", "--json"))
    assert [entry["name"] for entry in report["schemes"]] == ["good", "loud"]


def test_what_is_no_exception_ends_the_program_in_one_paragraph(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class PanicException(BaseException):
        """An exception like the one that libraries in Rust raise."""

    def fails(arguments: object) -> bool:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(listing, "answer", fails)
    monkeypatch.setattr("sys.argv", ["quark", "schemes"])
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code == 2
    assert capsys.readouterr().err.startswith("quark: PanicException: index out of bounds.")
