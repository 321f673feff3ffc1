"""``make bench``: what runs, what is left out, what becomes of one that fails, and which figures are held to which bars."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as bench
from benchmarks import calibrated, mixed_precision
from benchmarks.results import Measurement


@pytest.mark.parametrize("name", bench.BENCHMARKS)
def test_every_benchmark_is_a_function_of_arguments(name: str) -> None:
    module, _, function = bench.BENCHMARKS[name][0].partition(":")
    assert callable(getattr(importlib.import_module(f"benchmarks.{module}"), function))


def test_one_that_fails_or_lacks_a_model_does_not_lose_the_figures_of_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(arguments: list[str]) -> list[Measurement]:
        raise SystemExit("its interpreter ended")

    monkeypatch.setattr("benchmarks.startup.main", lambda arguments: [Measurement("start-up", "one", 2, "×", "import x", 3)])
    monkeypatch.setattr("benchmarks.formats.main", failing)
    with pytest.raises(SystemExit, match="failed: formats"):
        bench.main(["--results", str(tmp_path / "results.json"), "--only", "formats,rtn,startup"])
    (run,) = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["runs"]
    assert [one["case"] for one in run["measurements"]] == ["one"]
    assert "rtn is left out" in capsys.readouterr().out


def test_arguments_are_passed_on() -> None:
    args = bench.parser().parse_args(["--model", "m", "--text", "t", "--amd-quark", "python"])
    assert bench.BENCHMARKS["peers"][1](args) == ["m", "t", "--amd-quark", "python"]
    assert bench.BENCHMARKS["formats"][1](args) == ["--reference", "python"]
    assert bench.BENCHMARKS["ranks"][1](args) == ["m", "t/foldoc.txt", "--repeats", "1", "--calls", "8"]
    assert bench.BENCHMARKS["mixed"][1](bench.parser().parse_args(["--model", "m"])) is None


def test_calibrated_runs_are_held_to_forwards_to_a_busy_process_and_to_accuracy() -> None:
    run = {"algorithm": "awq+gptq+tuning", "scheme": "int4_wo_64", "ratio": 16, "busy_ratio": 1.5, "perplexity": 33, "mean_kl": 0.15}
    met = {one.benchmark: (one.bar, one.is_met) for one in calibrated.measurements([run])}
    assert met == {
        "calibrated rounding": (15, False),
        "calibrated rounding: beside a busy process": (2, True),
        "accuracy: perplexity": (33.8, True),
        "accuracy: divergence": (0.14, False),
    }
    (plain,) = calibrated.measurements([{"algorithm": "gptq", "scheme": "mxfp4", "ratio": 16}])
    assert plain.bar is None


def row(choice: str, names: list[str], target: float, kl: float, bits: float = 0) -> dict[str, Any]:
    return {"choice": choice, "candidates": names, "target": target, "kl": kl, "bits": bits}


def test_a_choice_is_compared_with_the_best_scheme_of_at_most_its_size_and_with_the_heuristic() -> None:
    alone = [row("uniform", [name], 0, kl, bits) for name, kl, bits in (("a", 0.1, 8), ("b", 0.4, 5), ("c", 0.5, 4))]
    rows = [*alone, row("ends", ["a", "c"], 5, 0.8), row("fisher", ["a", "c"], 5, 0.2)]
    assert [(one.value, one.bar) for one in mixed_precision.measurements(rows)] == [(0.5, 1), (0.25, 1)]
