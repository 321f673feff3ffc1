"""Whichever operation on a file fails, a run ends in a result or in one sentence, and can be resumed."""

from __future__ import annotations

import errno
import random
import shutil
from pathlib import Path

import pytest

from .interrupted import DATA, files
from .killed_runs import REFUSED
from .test_killed_runs import Killer, killer

pytestmark = pytest.mark.thorough

FAULTS = {"full": (errno.ENOSPC, True), "broken": (errno.EIO, False)}
"""A disk that is full from then on, and one that fails once."""


def fails(jobs: Killer, place: Path, name: str, number: int, fault: str) -> None:
    """Check a run whose disk fails at one operation, and the run that is resumed after it."""
    error, is_sticky = FAULTS[fault]
    place.mkdir()
    out = place / "out"
    disk = {"number": number, "error": error, "is_sticky": is_sticky}
    code = jobs.run(out, name, disk=disk, report=str(place.with_suffix(".json")))
    said = place.with_suffix(".said").read_text() if code == REFUSED else ""
    what = f"operation {number} of {name}, {fault}: exit code {code}, {said!r}"
    assert code in (0, REFUSED), what
    assert out.exists() == (code == 0), what
    left = [path.name for path in place.glob(".*")]
    assert all(one in said for one in left), f"{what}; and there is {left}"
    assert "Nothing was left behind" not in said or not left, what
    assert jobs.run(out, name) == 0, what
    assert files(out) == files(place.parent / "once"), what
    assert not list(place.glob(".*")), what
    shutil.rmtree(place)


def operations(jobs: Killer, tmp_path: Path, name: str) -> int:
    """The number of operations of an undisturbed run, whose output is ``once``."""
    (tmp_path / "counted").mkdir()
    assert jobs.run(tmp_path / "counted" / "out", name, operations=str(tmp_path / "count")) == 0
    (tmp_path / "counted" / "out").rename(tmp_path / "once")
    return int((tmp_path / "count").read_text())


@pytest.mark.posix("the operations are those of other systems")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("round to nearest", 0.05),
        pytest.param("round to nearest", 1.0, marks=pytest.mark.slow),
        pytest.param("gptq", 1.0, marks=pytest.mark.slow),
    ],
)
def test_a_run_whose_disk_fails_gives_a_result_or_one_sentence(name: str, share: float, fault: str, source: Path, tmp_path: Path) -> None:
    rng = random.Random(fault)
    with killer(source, DATA, 60_000) as jobs:
        count = operations(jobs, tmp_path, name)
        numbers = sorted(rng.sample(range(count), round(share * count)))
        for number in sorted({*numbers[:-1], count - 2, count - 1}):
            fails(jobs, tmp_path / str(number), name, number, fault)
