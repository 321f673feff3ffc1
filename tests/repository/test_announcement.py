"""A run of many tests says at its start how many there are, how long they take here, and what fails here."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.kit.announcement import announcement, caveats


def test_it_says_how_many_tests_run_and_how_long() -> None:
    line = announcement(6000, 2, few=True).splitlines()[0]
    assert re.fullmatch(r"6,000 tests \(a selection; `make test ALL=1` runs all\), processes: 2, minutes: about \d+ if .*", line)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have none")
def test_it_says_that_torch_lacks_what_it_needs(tmp_path: Path) -> None:
    assert caveats(tmp_path) == [f"{tmp_path} is not mounted here: torch cannot compute with float16, so some tests fail"]
    (tmp_path / "cpuinfo").touch()
    assert caveats(tmp_path) == []
