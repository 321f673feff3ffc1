"""Rates of the machine: what each is a ratio of."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

import quark_tiny_model as tiny
from quark.runs import probe as module
from quark.runs.probe import _copied, _products, _read, _rounded, _seconds, _solved, probe
from quark.runs.run import Run, plan_run
from quark.torch import LLMTemplate

CPU = torch.device("cpu")


def run_of(*algorithms: str) -> Run:
    return plan_run(tiny.tiny_model(), LLMTemplate.get("llama").get_config(scheme="int4_wo_32", algorithm=list(algorithms)))


@pytest.fixture
def two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every measurement takes two seconds; its work is done once."""

    def measured(work: object, device: torch.device) -> float:
        assert callable(work)
        work()
        return 2.0

    monkeypatch.setattr(module, "_seconds", measured)


@pytest.mark.usefixtures("two_seconds")
def test_rates_are_work_by_seconds() -> None:
    assert _products(CPU, torch.float32) == 2 * 256 * 1024 * 1024 / 2
    assert _copied(CPU) == (64 << 20) / 2


@pytest.mark.usefixtures("two_seconds")
def test_the_roundings_of_a_run_count_by_the_elements_of_a_sample() -> None:
    rows = [row for row in run_of().plan.quantized if row.name.startswith("model.layers.0.self_attn.")]
    assert len(rows) == 4
    elements = sum(row.shape[0] * row.shape[1] for row in rows)
    assert _rounded(rows, CPU, torch.float32) == pytest.approx(2 * 4 / elements)
    assert _rounded([], CPU, torch.float32) == 0.0


@pytest.mark.usefixtures("two_seconds")
def test_a_solver_counts_by_the_cube_of_its_columns() -> None:
    run = run_of("gptq")
    rows, columns = next(row for row in run.plan.rows if row.algorithm).shape
    assert _solved(run, CPU, torch.float32) == pytest.approx(2 / (columns**3 / 3 + 2 * rows * columns**2))
    assert _solved(run_of(), CPU, torch.float32) is None


@pytest.mark.usefixtures("two_seconds")
def test_a_machine_has_the_rates_of_all_that_a_run_does(tmp_path: Path) -> None:
    machine = probe(run_of("gptq"), CPU, torch.bfloat16, None)
    assert (machine.products, machine.products32) == (1 << 28, 1 << 28)
    assert machine.read == machine.copied == 1 << 25
    assert machine.rounded > 0
    assert machine.solved is not None
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    assert probe(run_of(), CPU, torch.bfloat16, tmp_path / "file").read != machine.copied


def test_a_file_is_read_to_its_end_or_as_long_as_a_measurement_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(bytes(9 << 20))
    for step, size in ((0.01, 9 << 20), (0.3, 4 << 20)):
        times: list[float] = []
        clock = itertools.count(1.0, step)
        monkeypatch.setattr(module.time, "perf_counter", lambda clock=clock, times=times: times.append(next(clock)) or times[-1])
        assert _read(tmp_path / "file") == pytest.approx(size / (times[-1] - times[0]))
    assert _read(tmp_path / "missing") == 1e9


@pytest.mark.parametrize(("takes", "runs"), [(0.2, 1), (0.1, 2), (0.04, 4), (0.001, 5)])
def test_the_shortest_of_a_few_runs_counts(takes: float, runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    done: list[int] = []

    def work() -> None:
        done.append(1)
        now[0] += takes if len(done) < 5 else takes / 2

    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    assert _seconds(work, CPU) == pytest.approx(takes / 2 if runs == 5 else takes)
    assert len(done) == runs


def test_a_measurement_leaves_the_random_numbers_of_the_program_alone() -> None:
    state = torch.get_rng_state()
    _products(CPU, torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
