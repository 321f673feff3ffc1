"""``quark.common.utils.log``: the documented name of loggers."""

from __future__ import annotations

from quark.log import get_logger

__all__ = ["ScreenLogger"]

ScreenLogger = get_logger
