"""The clock of phases: each second counts once."""

from __future__ import annotations

from itertools import count

import pytest

from quark.calibration.phases import PhaseClock


def clock() -> PhaseClock:
    """A clock that advances by a second with each reading."""
    ticks = count()
    return PhaseClock(lambda: float(next(ticks)))


def test_a_phase_inside_another_is_not_counted_twice() -> None:
    ticking = clock()
    with ticking.phase("forward"):  # 0
        with ticking.phase("solve"):  # 1
            pass  # 2
        with ticking.phase("forward"):  # 3
            pass  # 4
    assert ticking.seconds == {"forward": 4.0, "solve": 1.0}  # until 5


def test_time_outside_of_all_phases_is_not_counted() -> None:
    ticking = clock()
    for _ in range(3):
        with ticking.phase("load"):
            pass
    assert ticking.seconds == {"load": 3.0}


def test_a_lap_has_the_seconds_since_the_last() -> None:
    ticking = clock()
    with ticking.phase("load"):
        pass
    assert ticking.lap() == {"load": 1.0}
    with ticking.phase("write"):
        pass
    assert ticking.lap() == {"write": 1.0}
    assert ticking.lap() == {}


def test_an_error_ends_its_phase() -> None:
    ticking = clock()
    with pytest.raises(ValueError, match="no"), ticking.phase("load"):
        raise ValueError("no")
    with ticking.phase("write"):
        pass
    assert ticking.seconds == {"load": 1.0, "write": 1.0}
