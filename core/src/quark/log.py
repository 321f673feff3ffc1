"""Messages to people: the standard logger ``quark``, shown as ``[QUARK-INFO]: …`` on stderr unless the application configures logging."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["get_logger", "left_to_the_bar", "writes_to_stderr"]


class _StderrUnlessConfigured(logging.Handler):
    """Writes to the current stderr, and stays silent where the root logger has handlers: then the application decides."""

    def emit(self, record: logging.LogRecord) -> None:
        if writes_to_stderr():
            sys.stderr.write(f"[QUARK-{record.levelname}]: {record.getMessage()}\n")


def get_logger(name: str = "quark") -> logging.Logger:
    """Return the logger of that name below ``quark``; the first call gives ``quark`` its handler."""
    root = logging.getLogger("quark")
    if _own_handler(root) is None:
        root.addHandler(_StderrUnlessConfigured())
        if root.level == logging.NOTSET:
            root.setLevel(logging.INFO)
    return root if name == "quark" else root.getChild(name.removeprefix("quark."))


def writes_to_stderr() -> bool:
    """Return whether quark shows its log itself: the application has configured no handlers."""
    return not logging.getLogger().handlers


@contextmanager
def left_to_the_bar(name: str) -> Iterator[None]:
    """Keep what is logged under a name off stderr while a bar shows the same; other handlers get it all the same."""

    def is_other(record: logging.LogRecord) -> bool:
        return record.name != name

    handler = _own_handler(get_logger())
    assert handler is not None
    handler.addFilter(is_other)
    try:
        yield
    finally:
        handler.removeFilter(is_other)


def _own_handler(root: logging.Logger) -> logging.Handler | None:
    return next((handler for handler in root.handlers if isinstance(handler, _StderrUnlessConfigured)), None)
