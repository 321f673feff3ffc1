"""Runs without what they tell a user."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from quark.log import get_logger

__all__ = ["quietly"]


@contextmanager
def quietly() -> Iterator[None]:
    """Keep what runs of the pipeline log, and progress bars of loading and saving, off the terminal: a report says what matters."""
    from transformers.utils import logging as transformers_logging

    logger, bars = get_logger(), transformers_logging.is_progress_bar_enabled()
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()
