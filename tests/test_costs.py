"""Runs have the costs that `tools/costs/costs.json` records, in counts that no machine and no load
changes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools.costs import recorded
from tools.costs.counter import OperationCounter
from tools.costs.recorded import differences
from tools.costs.runs import RUNS, Cost

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parents[1]


PINNED = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)[0]
by_pinned_torch = pytest.mark.skipif(
    not torch.__version__.startswith(PINNED), reason=f"costs are recorded with torch {PINNED}: other releases compute by other operators"
)


@by_pinned_torch
def test_runs_cost_what_was_recorded() -> None:
    """In a fresh process, where no other test has filled a cache, and where built-in roundings are trusted. A
    cost that falls is to be recorded too, so that what was won is not lost again unseen."""
    done = costs_shown(TRITON_INTERPRET="0")
    assert done.returncode == 0, f"{done.stderr[-2000:]}\n{done.stdout}\nparts shows where, record keeps it: python -m tools.costs --help"
    assert recorded.read().keys() == RUNS.keys()


@by_pinned_torch
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed: make kernels")
def test_runs_by_kernels_cost_what_was_recorded() -> None:
    done = costs_shown("show", *(name for name, case in RUNS.items() if case.uses_kernels), TRITON_INTERPRET="1")
    assert done.returncode == 0, f"{done.stderr[-2000:]}\n{done.stdout}"


def costs_shown(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `tools.costs` in a process where built-in roundings are trusted."""
    environment = {name: value for name, value in os.environ.items() if name != "QUARK_STRICT_PLUGINS"} | variables
    command = [sys.executable, "-m", "tools.costs", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_differences_are_those_above_two_percent() -> None:
    before = Cost(2.0, 100.0, 1000, 50)
    assert differences(before, Cost(2.039, 98.1, 1020, 49)) == []
    found = differences(before, Cost(2.05, 97.9, 1021, 48))
    assert [(d.unit, d.is_rise) for d in found] == [("flops", True), ("bytes", False), ("operations", True), ("waits", False)]


def test_a_rise_is_recorded_with_its_reason_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tools.costs import __main__ as program

    monkeypatch.setattr(recorded, "FILE", tmp_path / "costs.json")
    name, cheap, dear = "rtn", Cost(1.0, 1.0, 10, 1), Cost(1.0, 1.0, 11, 1)
    recorded.write({}, {name: cheap}, {})
    monkeypatch.setattr(program, "cost_of", lambda case: dear)
    assert "--why" in str(program.main(["record", name]))
    assert recorded.read() == {name: cheap}
    assert program.main(["record", name, "--why", "two figures more"]) is None
    assert recorded.read() == {name: dear}
    assert "two figures more" in recorded.FILE.read_text(encoding="utf-8")


def test_flops_of_products_and_factorizations() -> None:
    spd = torch.eye(6) * 2
    with OperationCounter() as counter:
        torch.ones(2, 3) @ torch.ones(3, 4)
        torch.zeros(5).addmv_(torch.ones(5, 7), torch.ones(7))
        torch.linalg.cholesky_ex(spd)
    assert counter.total.flops == 2 * 2 * 3 * 4 + 2 * 5 * 7 + 6**3 / 3


def test_bytes_of_what_is_read_and_written() -> None:
    x, row = torch.ones(4, 8), torch.ones(8)
    with OperationCounter() as counter:
        x + row.expand(4, 8)
    assert (counter.total.bytes, counter.total.operations) == (4 * (32 + 8 + 32), 1)
    with OperationCounter() as counter:
        x.view(32).t()[:3]
        torch.empty(1000)
    assert counter.total.bytes == 0
