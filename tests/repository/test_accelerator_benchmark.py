"""The benchmark of large models runs small ones on the CPU, and its checkpoints have the names of published ones."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from benchmarks import accelerator
from benchmarks.accelerator import CASES, Case, Measured, Rates, table
from benchmarks.random_checkpoints import SHAPES, random_config, write_random_checkpoint
from quark_workbench.planning.estimate import Estimate
from quark_workbench.planning.workload import Workload

MEASURED = Measured(
    seconds=30.0, block=2.0, phases={"solve": 5.0}, peak=8 << 30, size=10, floor=10.0, forecast=15.0, forecast_peak=16 << 30, copy=6.0
)


def test_a_run_of_every_case_is_measured_beside_its_floor_and_forecast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, kept = tmp_path / "results.json", tmp_path / "kept"
    kept.mkdir()
    command = ["--device", "cpu", "--samples", "2", "--length", "32", "--results", str(file), "--directory", str(kept)]
    assert accelerator.main(["tiny", "tiny-mixture", *command]) == 0
    shown, cases = capsys.readouterr().out, json.loads(file.read_text(encoding="utf-8"))["cases"]
    for name, shape in (("tiny", "tiny-all"), ("tiny-mixture", "tiny-mixture-all")):
        one = Measured(**cases[name])
        assert one.size == sum(path.stat().st_size for path in (kept / shape).glob("*.safetensors"))
        assert {"load", "forward", "statistics", "solve", "write"} <= one.phases.keys()
        assert one.seconds > sum(one.phases.values()) > one.block > 0
        assert min(one.floor, one.forecast, one.copy) > 0
        assert f"| {name} | {one.seconds:.1f} |" in shown
    assert sorted(path.name for path in kept.iterdir()) == ["tiny-all", "tiny-mixture-all"]


def test_no_case_begins_after_the_time_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert accelerator.main(["tiny", "--device", "cpu", "--minutes", "-1", "--directory", str(tmp_path)]) == 1
    assert "tiny: does not run" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit):
        accelerator.main(["none-such"])


@pytest.mark.parametrize(
    ("bars", "missed"),
    [
        ({}, ""),
        ({"seconds": 29.0}, "30 seconds, wanted at most 29"),
        ({"seconds": 30.0, "block_seconds": 2.0, "peak": 8 << 30, "share_of_copy": 0.2}, ""),
        ({"block_seconds": 1.5}, "2 seconds a block, wanted at most 1.5"),
        ({"peak": 8_000_000_000}, "8.59e+09 bytes, wanted at most 8e+09"),
        ({"share_of_copy": 0.8}, "5 times a copy, wanted at most 1.25"),
    ],
)
def test_a_bar_that_is_missed_is_said(bars: dict[str, float], missed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = attrs.evolve(Case("tiny"), **bars)
    assert "; ".join(MEASURED.missed(case)) == missed
    monkeypatch.setattr(accelerator, "CASES", {"tiny": case})
    expected = f"| tiny | 30.0 | 2.00 | solve 5.0 | 8.0 | 10.0 | 3.00 | 2.00, memory 0.50 | {missed or 'met'} |"
    assert list(table({"tiny": MEASURED}))[-1] == expected


def test_the_floor_is_that_of_products_or_of_the_disk() -> None:
    estimate = Estimate(None, {}, Workload(forward=60, statistics=40, solver=20))
    assert Rates(bfloat16=10.0, float32=5.0, copy=100.0).floor(estimate, 100) == 14.0
    assert Rates(bfloat16=10.0, float32=5.0, copy=1.0).floor(estimate, 100) == 100.0


@pytest.mark.parametrize("name", CASES)
def test_every_case_has_a_configuration_for_its_shape(name: str) -> None:
    case = CASES[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(random_config(case.shape, 1))
    assert case.config().global_quant_config.weight is not None
    assert model.config.model_type == SHAPES[case.shape]["model_type"]


@pytest.mark.parametrize("shape", ["tiny", "tiny-mixture"])
def test_a_checkpoint_loads_whole_and_holds_experts_one_by_one(shape: str, tmp_path: Path) -> None:
    source = write_random_checkpoint(tmp_path / "source", shape, 1)
    model, loading = AutoModelForCausalLM.from_pretrained(source, output_loading_info=True)
    assert not any(loading.values())
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    with safe_open(source / "model.safetensors", "pt") as file:
        assert ("model.layers.0.mlp.experts.7.up_proj.weight" in file.keys()) == (shape == "tiny-mixture")  # noqa: SIM118
