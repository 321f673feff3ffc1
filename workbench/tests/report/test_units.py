"""Numbers as people read them."""

from __future__ import annotations

import pytest

from quark_workbench.report.units import seconds_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.004, "4.0 ms"),
        (0.0123, "12 ms"),
        (75, "75.0 s"),
        (599, "599 s"),
        (600, "10 min"),
        (7100, "118 min"),
        (7200, "2 h 0 min"),
        (7300, "2 h 2 min"),
        (100_000, "27 h 47 min"),
    ],
)
def test_a_duration_has_the_unit_that_suits_it(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text
