"""Runs of checks print nothing, and what was chosen before holds again afterwards."""

from __future__ import annotations

import logging

import pytest
from transformers.utils import logging as transformers_logging

from quark.base.log import get_logger
from quark_devkit.quiet import quietly


def test_nothing_is_shown_inside_and_the_level_and_progress_bars_come_back() -> None:
    logger = get_logger()
    before, bars = logger.level, transformers_logging.is_progress_bar_enabled()
    with quietly():
        assert not logger.isEnabledFor(logging.ERROR)
        assert not transformers_logging.is_progress_bar_enabled()
    assert (logger.level, transformers_logging.is_progress_bar_enabled()) == (before, bars)
    with pytest.raises(KeyError), quietly():
        raise KeyError
    assert logger.level == before
