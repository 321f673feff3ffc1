"""Runs without what they tell a user."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from quark.log import get_logger

__all__ = ["quietly"]


@contextmanager
def quietly() -> Iterator[None]:
    """A context in which quark logs errors only: checks make many runs, and a report is all that they should print."""
    logger = get_logger()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
