"""Functions for the log of quark. They provide its logger, write log lines above a progress bar, and escape
control characters.

The logger ``quark`` writes lines such as ``[QUARK-INFO]: …`` to stderr. If the application configures
logging, its handlers get the lines, and quark does not write to stderr. Control characters in texts of
plugins are escaped, because a terminal would execute them.
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
    """A log handler that writes to stderr if the root logger has no handlers.

    If the root logger has handlers, they write the log instead.

    Attributes:
        write: The function that writes a line.
    """

    def __init__(self) -> None:
        super().__init__()
        self.write: Callable[[str], object] = _to_stderr

    def emit(self, record: logging.LogRecord) -> None:
        """Write the lines of a record with control characters escaped.

        If stderr is closed, the error is ignored, and the run continues.
        """
        if writes_to_stderr():
            with suppress(OSError):
                self.write(f"[QUARK-{record.levelname}]: {shown_lines(record.getMessage())}")


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")


_HANDLER = _StderrUnlessConfigured()
_LEVEL = "QUARK_LOG_LEVEL"
_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}
"""Dictionary from value of ``QUARK_LOG_LEVEL`` to log level. The values are those of AMD Quark."""


def get_logger(name: str = "quark") -> logging.Logger:
    """Return the logger ``name``, which must be ``quark`` or start with ``quark.``.

    The first call adds a handler to the logger ``quark``. If the application has not set the level of that
    logger, the call also sets it from the environment variable ``QUARK_LOG_LEVEL``.
    """
    root = logging.getLogger("quark")
    if _HANDLER not in root.handlers:
        root.addHandler(_HANDLER)
        if root.level == logging.NOTSET:
            asked = os.environ.get(_LEVEL, "info")
            root.setLevel(_LEVELS.get(asked.lower(), logging.INFO))
            if asked.lower() not in _LEVELS:
                root.warning(f"{_LEVEL}={asked!r} is not a log level. Use {', '.join(_LEVELS)}.")
    return root if name == "quark" else root.getChild(name.removeprefix("quark."))


def writes_to_stderr() -> bool:
    """Return whether quark writes its log to stderr itself.

    This is so if the application has configured no log handlers.
    """
    return not logging.getLogger().handlers


@contextmanager
def beside_a_bar(write: Callable[[str], object], shown: str) -> Iterator[None]:
    """Write log lines above a progress bar instead of to stderr inside the ``with`` block.

    Other handlers are not changed.

    Args:
        write: The function that writes a line above the bar.
        shown: The name of a logger whose lines are not written, because the bar shows the same information.
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
    """The number of `silenced` contexts that are open in all threads, and the log level before the first of
    them was opened."""

    lock = threading.Lock()
    contexts = 0
    level = logging.NOTSET


@contextmanager
def silenced(level: int = logging.ERROR) -> Iterator[None]:
    """Log nothing below ``level`` inside the ``with`` block.

    Use this context for a trial run that would log the same warnings again. If several contexts are open, in
    one thread or several, the level of the first context applies until the last context ends.
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
    """Return the first character of ``text`` that a terminal would not show, or None if it would show all of
    them.

    These are control characters, such as the escape character, and marks that change the direction of text.

    >>> unprintable("4-bit weights"), unprintable("ends\\x1b[2J")
    (None, '\\x1b')
    """
    return None if text.isprintable() else next((character for character in text if not _is_shown(character)), None)


def shown(text: str) -> str:
    """Return ``text`` with every `unprintable` character escaped like in a string literal of Python.

    >>> print(shown("red \\x1b[31m and\\nnew"))
    red \\x1b[31m and\\nnew
    """
    if text.isprintable():
        return text
    return "".join(character if _is_shown(character) else repr(character)[1:-1] for character in text)


def shown_lines(text: str) -> str:
    """Return ``text`` with every `unprintable` character escaped, except line ends."""
    return "\n".join(map(shown, text.split("\n")))


def _is_shown(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"
