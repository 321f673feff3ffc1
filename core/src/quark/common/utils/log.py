"""``quark.common.utils.log``: AMD Quark's name of loggers."""

from __future__ import annotations

from quark.log import get_logger

__all__ = ["ScreenLogger"]

ScreenLogger = get_logger
