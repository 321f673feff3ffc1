"""Runs without what they tell a user."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from quark.base.log import silenced

__all__ = ["quietly"]


@contextmanager
def quietly() -> Iterator[None]:
    """Keep what runs of the pipeline log, and progress bars of loading and saving, off the terminal: a report says what matters."""
    from transformers.utils import logging as transformers_logging

    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with silenced(logging.CRITICAL):
            yield
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
