"""The log: a thread can silence its warnings; texts of plugins become printable lines."""

from __future__ import annotations

import ast
import io
import logging
import threading
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quark.base.log import get_logger, shown, silenced, unprintable


def test_a_line_of_the_log_obeys_nobody(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    get_logger("quark.names").warning("no place for 'x\x1b]0;title\x07'\n  and more")
    assert capsys.readouterr().err == "[QUARK-WARNING]: no place for 'x\\x1b]0;title\\x07'\n  and more\n"


def test_a_reader_that_is_gone_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr("sys.stderr", Gone())
    get_logger().warning("nobody reads this")


def test_the_level_comes_back_when_the_last_of_several_threads_is_done() -> None:
    before, first, second = get_logger().level, ExitStack(), ExitStack()
    first.enter_context(silenced())
    thread = threading.Thread(target=lambda: second.enter_context(silenced()))
    thread.start()
    thread.join()
    first.close()
    assert get_logger().level == logging.ERROR
    second.close()
    assert get_logger().level == before


@pytest.mark.parametrize(
    ("asked", "level"), [("error", "ERROR"), ("Warning", "WARNING"), ("debug", "DEBUG"), ("loud", "INFO"), (None, "INFO")]
)
def test_the_environment_sets_the_level_unless_the_application_has(
    asked: str | None, level: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger("quark")
    before, handlers = root.level, root.handlers[:]
    monkeypatch.setattr("quark.base.log.writes_to_stderr", lambda: True)
    if asked is not None:
        monkeypatch.setenv("QUARK_LOG_LEVEL", asked)
    try:
        for own, expected in ((logging.NOTSET, level), (logging.CRITICAL, "CRITICAL")):
            root.handlers, root.level = [], own
            assert logging.getLevelName(get_logger().level) == expected
    finally:
        root.handlers = handlers
        root.setLevel(before)
    assert ("QUARK_LOG_LEVEL='loud' is not a log level. Use debug, " in capsys.readouterr().err) is (asked == "loud")


@pytest.mark.parametrize("text", ["", "4-bit weights", "[red]not markup[/]", "Σ x² ≤ ½ · 10\u00a0%", "量子化 🚀"])
def test_what_can_be_read_stays(text: str) -> None:
    assert unprintable(text) is None
    assert shown(text) == text


@pytest.mark.parametrize(
    "character", ["\x1b", "\n", "\r", "\t", "\b", "\x00", "\x7f", "\x9b", "\u202e", "\u2066", "\u200b", "\u2028", "\ud800"]
)
def test_what_a_terminal_would_obey_is_written_out(character: str) -> None:
    assert unprintable(f"a{character}b") == character
    assert shown(f"a{character}b") == f"a{ascii(character)[1:-1]}b"


@given(st.text())
def test_what_is_shown_is_one_printable_line_and_says_what_was_there(text: str) -> None:
    assert unprintable(shown(text)) is None
    assert len(shown(text).splitlines()) <= 1
    if "\\" not in text:
        assert ast.literal_eval('"' + shown(text).replace('"', '\\"') + '"') == text
