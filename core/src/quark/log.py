"""Messages to people: the standard logger ``quark``, shown as ``[QUARK-INFO]: …`` on stderr unless the application configures logging."""

from __future__ import annotations

import logging
import sys

__all__ = ["get_logger"]


class _StderrUnlessConfigured(logging.Handler):
    """Writes to the current stderr, and stays silent where the root logger has handlers: then the application decides."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            sys.stderr.write(f"[QUARK-{record.levelname}]: {record.getMessage()}\n")


def get_logger(name: str = "quark") -> logging.Logger:
    """Return the logger of that name below ``quark``; the first call gives ``quark`` its handler."""
    root = logging.getLogger("quark")
    if not any(isinstance(h, _StderrUnlessConfigured) for h in root.handlers):
        root.addHandler(_StderrUnlessConfigured())
        if root.level == logging.NOTSET:
            root.setLevel(logging.INFO)
    return root if name == "quark" else root.getChild(name.removeprefix("quark."))
