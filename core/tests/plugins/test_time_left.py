"""The time left goes by the work that is done and the time that it took."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quark.plugins.run_events import TimeLeft


@given(st.lists(st.floats(0.5, 1e6), min_size=1, max_size=20), st.floats(1e-3, 1e3))
def test_at_a_steady_rate_the_time_left_is_right_after_every_piece(work: list[float], rate: float) -> None:
    left = TimeLeft(work)
    assert left.seconds is None
    for number, one in enumerate(work):
        left.finish(number, one / rate)
        assert left.seconds == pytest.approx(math.fsum(work[number + 1 :]) / rate, rel=1e-9, abs=1e-9 * math.fsum(work) / rate)


def test_pieces_without_work_say_nothing_of_the_rate() -> None:
    left = TimeLeft([0, 4, 0, 8])
    left.finish(0, seconds=100.0)
    assert left.seconds is None
    left.finish(1, seconds=2.0)
    left.finish(2, seconds=100.0)
    assert left.seconds == 4.0
