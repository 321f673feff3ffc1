"""Handling of SIGINT and SIGTERM.

With `termination_unwinds`, SIGTERM raises an exception, like Ctrl-C. `uninterrupted` delays both signals.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def termination_unwinds() -> Iterator[None]:
    """Make SIGTERM raise ``SystemExit(143)`` inside the ``with`` block.

    Shells report the exit code 143 for a program that SIGTERM has ended. Because SIGTERM raises an exception,
    the code that removes unfinished output runs, like after Ctrl-C.

    This context has no effect outside the main thread, or if the program already handles or ignores SIGTERM.
    """
    if not _in_main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until the ``with`` block has ended.

    This context has no effect outside the main thread.
    """
    if not _in_main_thread():
        yield
        return
    received: list[int] = []
    # If a handler was not installed from Python, it is None. It cannot be restored, so it is kept.
    handlers = {number: handler for number in _ENDING if (handler := signal.getsignal(number)) is not None}
    try:
        for number in handlers:
            signal.signal(number, lambda n, _frame: received.append(n))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for late in dict.fromkeys(received):
            signal.raise_signal(late)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
