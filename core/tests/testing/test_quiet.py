"""Runs of checks print errors only, and what was chosen before holds again afterwards."""

from __future__ import annotations

import logging

import pytest

from quark.log import get_logger
from quark.testing.quiet import quietly


def test_remarks_are_not_shown_inside_and_the_level_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger()
    before = logger.level
    with quietly():
        logger.warning("unseen")
        assert not logger.isEnabledFor(logging.WARNING)
    assert logger.level == before
    with pytest.raises(KeyError), quietly():
        raise KeyError
    assert logger.level == before
