"""A killed run from disk is resumed, and gives the bytes and the report of an undisturbed one."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from quark_tiny_model import calibration_batches, tiny_model_dir

from .interrupted import (
    CASES,
    DATA,
    files,
)

pytestmark = pytest.mark.thorough


class Killer:
    """Runs jobs in processes that are killed (`killed_runs`)."""

    def __init__(self, process: subprocess.Popen[str], source: Path, data: list[torch.Tensor], max_shard_bytes: int) -> None:
        self._process = process
        self._common = {"source": str(source), "data": [x.tolist() for x in data], "max_shard_bytes": max_shard_bytes}

    def run(self, out: Path, name: str, **job: Any) -> int:
        """The exit code of a run; its report lies beside ``out``, and an error of quark's beside that directory."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        report = str(out.parent / f"{out.name}.json")
        said = str(out.parent.with_suffix(".said"))
        line = {**self._common, "out": str(out), "choices": CASES[name], "resume": True, "report": report, "said": said, **job}
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def compare(self, tmp_path: Path, name: str, rng: random.Random, kills: int) -> None:
        """Check that a run that is killed ``kills`` times and resumed each time gives the result of one run."""
        once, out, count = tmp_path / "once", tmp_path / "out", tmp_path / "count"
        assert self.run(once, name, count=str(count)) == 0
        total, killed = int(count.read_text()), 0
        points = [rng.randrange(100, total) for _ in range(kills)]
        for point in points:
            # A resumed run writes less than the whole: some points lie behind its end.
            code = self.run(out, name, kill_after=point)
            assert code != 1
            killed += code != 0
            if code == 0:
                break
        if not out.exists():
            assert self.run(out, name) == 0
        assert killed, f"no run was killed after {points} of {total} bytes"
        assert files(out) == files(once)
        assert (tmp_path / "out.json").read_text() == (tmp_path / "once.json").read_text()
        assert not list(tmp_path.glob(".*"))


@contextmanager
def killer(source: Path, data: list[torch.Tensor], max_shard_bytes: int) -> Iterator[Killer]:
    command = [sys.executable, str(Path(__file__).with_name("killed_runs.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Killer(process, source, data, max_shard_bytes)
        assert process.stdin is not None
        process.stdin.close()


def test_a_run_that_is_killed_in_the_middle_of_a_write_is_resumed(source: Path, tmp_path: Path) -> None:
    rng = random.Random(15)
    with killer(source, DATA, 60_000) as jobs:
        for name in ("round to nearest", "awq and gptq", "gptq and branches"):
            (tmp_path / name).mkdir()
            jobs.compare(tmp_path / name, name, rng, kills=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["round to nearest", "gptq", "awq", "awq and gptq", "static activations and cache", "branches"])
def test_a_run_of_the_tiny_model_is_killed_at_many_points_and_resumed(name: str, tmp_path: Path) -> None:
    rng = random.Random(name)
    with killer(tiny_model_dir(), calibration_batches(4, 64), 500_000) as jobs:
        for number in range(12):
            (tmp_path / str(number)).mkdir()
            jobs.compare(tmp_path / str(number), name, rng, kills=1 + number % 4)
