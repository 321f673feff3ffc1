"""The log: the logger ``quark`` on stderr, lines beside a bar, and texts of plugins made printable.

Lines look like ``[QUARK-INFO]: …``. An application that configures logging gets them instead of stderr.
Control characters in texts of plugins are escaped, because a terminal would obey them.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


class _StderrUnlessConfigured(logging.Handler):
    """Writes to stderr, unless the root logger has handlers: then the application decides.

    Attributes:
        write: Writes a line.
    """

    def __init__(self) -> None:
        super().__init__()
        self.write: Callable[[str], object] = _to_stderr

    def emit(self, record: logging.LogRecord) -> None:
        """Write the lines of a record, with control characters escaped. A closed stderr ends no run."""
        if writes_to_stderr():
            with suppress(OSError):
                self.write(f"[QUARK-{record.levelname}]: {shown_lines(record.getMessage())}")


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")


_HANDLER = _StderrUnlessConfigured()
_LEVEL = "QUARK_LOG_LEVEL"
_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}
"""Values of the environment variable for the level, as in AMD Quark."""


def get_logger(name: str = "quark") -> logging.Logger:
    """Return the logger of that name below ``quark``.

    The first call gives ``quark`` its handler. It also sets the level from the environment variable
    ``QUARK_LOG_LEVEL``, unless the application has set one.
    """
    root = logging.getLogger("quark")
    if _HANDLER not in root.handlers:
        root.addHandler(_HANDLER)
        if root.level == logging.NOTSET:
            asked = os.environ.get(_LEVEL, "info")
            root.setLevel(_LEVELS.get(asked.lower(), logging.INFO))
            if asked.lower() not in _LEVELS:
                root.warning(f"{_LEVEL}={asked!r} is not a log level: use {', '.join(_LEVELS)}.")
    return root if name == "quark" else root.getChild(name.removeprefix("quark."))


def writes_to_stderr() -> bool:
    """Return whether quark writes its log itself, because the application has configured no handlers."""
    return not logging.getLogger().handlers


@contextmanager
def beside_a_bar(write: Callable[[str], object], shown: str) -> Iterator[None]:
    """Write lines for stderr above a progress bar; other handlers are not changed.

    Args:
        write: Writes a line above the bar.
        shown: Name of the logger whose lines the bar replaces.
    """

    def is_other(record: logging.LogRecord) -> bool:
        return record.name != shown

    _HANDLER.write = write
    _HANDLER.addFilter(is_other)
    try:
        yield
    finally:
        _HANDLER.removeFilter(is_other)
        _HANDLER.write = _to_stderr


class _Silence:
    """Number of open `silenced` contexts in all threads, and the level of the log before the first."""

    lock = threading.Lock()
    contexts = 0
    level = logging.NOTSET


@contextmanager
def silenced(level: int = logging.ERROR) -> Iterator[None]:
    """Log nothing below ``level`` during a trial that may be repeated with the same warnings.

    Nested and concurrent contexts keep the level of the first until the last ends.
    """
    with _Silence.lock:
        if _Silence.contexts == 0:
            _Silence.level = get_logger().level
            get_logger().setLevel(level)
        _Silence.contexts += 1
    try:
        yield
    finally:
        with _Silence.lock:
            _Silence.contexts -= 1
            if _Silence.contexts == 0:
                get_logger().setLevel(_Silence.level)


def unprintable(text: str) -> str | None:
    """Return the first character that a terminal would obey or hide, or None.

    These are control characters, such as escape, and marks that change the direction of text.

    >>> unprintable("4-bit weights"), unprintable("ends\\x1b[2J")
    (None, '\\x1b')
    """
    return None if text.isprintable() else next((character for character in text if not _is_shown(character)), None)


def shown(text: str) -> str:
    """Return a text with every `unprintable` character escaped as in a Python string.

    >>> print(shown("red \\x1b[31m and\\nnew"))
    red \\x1b[31m and\\nnew
    """
    if text.isprintable():
        return text
    return "".join(character if _is_shown(character) else repr(character)[1:-1] for character in text)


def shown_lines(text: str) -> str:
    """Return a text of several lines with every `unprintable` character except line ends escaped."""
    return "\n".join(map(shown, text.split("\n")))


def _is_shown(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"
