"""Signals that end a program: SIGTERM unwinds it as Ctrl-C does, and neither breaks into what must be done to its end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["termination_unwinds", "uninterrupted"]

_ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def termination_unwinds() -> Iterator[None]:
    """Make SIGTERM raise SystemExit with the exit code that a shell gives it, 143, so that what is being written is cleaned up.

    Without effect outside the main thread, and where the signal is handled or ignored already.
    """
    if not _in_main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def unwind(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back SIGINT and SIGTERM while the body runs; what came is delivered afterwards. Only the main thread can do so."""
    if not _in_main_thread():
        yield
        return
    came: list[int] = []
    # None is a handler that was not installed from Python: it cannot be put back, so it stays.
    handlers = {number: handler for number in _ENDING if (handler := signal.getsignal(number)) is not None}
    try:
        for number in handlers:
            signal.signal(number, lambda n, _frame: came.append(n))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for late in dict.fromkeys(came):
            signal.raise_signal(late)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
