"""Warnings are silenced while any thread wants it, and no longer."""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack

from quark.base.log import get_logger, silenced


def test_the_level_comes_back_when_the_last_of_several_threads_is_done() -> None:
    before, first, second = get_logger().level, ExitStack(), ExitStack()
    first.enter_context(silenced())
    thread = threading.Thread(target=lambda: second.enter_context(silenced()))
    thread.start()
    thread.join()
    first.close()
    assert get_logger().level == logging.ERROR
    second.close()
    assert get_logger().level == before
