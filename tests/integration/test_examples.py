"""The scripts of ``examples/`` work as they say on the tiny model, are short, and are listed."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))


def main_of(name: str) -> Callable[..., Any]:
    """The function ``main`` of a script."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    main: Callable[..., Any] = module.main
    return main


def quantized_to(out: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((out / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    return config


def test_quantize_and_export_runs_as_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["quantize_and_export.py", str(tmp_path / "out")])
    runpy.run_path(str(EXAMPLES / "quantize_and_export.py"), run_name="__main__")
    assert capsys.readouterr().out.startswith("And God said, Let there be ")
    assert quantized_to(tmp_path / "out")["quant_method"] == "quark"


def test_calibrated_has_smaller_errors_than_round_to_nearest(tmp_path: Path) -> None:
    shares = main_of("calibrated")(tmp_path / "out", count=4, length=128)
    assert len(shares) == 21
    assert sum(shares.values()) / len(shares) < 1
    assert [a["name"] for a in quantized_to(tmp_path / "out")["algo_config"]] == ["awq", "gptq"]


def test_disk_to_disk_says_how_far_it_is(tmp_path: Path) -> None:
    lines = main_of("disk_to_disk")(tmp_path / "out")
    assert [line.partition(":")[0] for line in lines] == [f"model.layers.{i}" for i in range(3)]
    assert lines[-1].endswith("0 s left")
    assert (tmp_path / "out" / "quark_report.html").is_file()


def test_mixed_precision_gives_layers_different_schemes(tmp_path: Path) -> None:
    counts = main_of("mixed_precision")(tmp_path / "out", count=2, length=64)
    assert len(counts) > 1
    assert sum(counts.values()) == 12
    assert "plot-pareto" in (tmp_path / "out" / "quark_report.html").read_text(encoding="utf-8")


def test_a_custom_scheme_is_used_and_leaves_no_name_behind(tmp_path: Path) -> None:
    lines = main_of("custom_scheme")(tmp_path / "out")
    assert sum(line.endswith("pattern: *.down_proj") for line in lines) == 3
    assert quantized_to(tmp_path / "out")["global_quant_config"]["weight"]["group_size"] == 32
    import quark

    assert "my_w4a8" not in quark.schemes()


def test_evaluate_and_report_says_how_good_it_is(tmp_path: Path) -> None:
    lines = main_of("evaluate_and_report")(tmp_path / "out")
    found = re.match(r"perplexity ([\d.]+), float model ([\d.]+)", lines[0])
    assert found is not None
    assert float(found[1]) > float(found[2])
    assert lines[1].startswith("KL divergence 0.")
    assert "bits per weight; worst layer model.layers." in lines[2]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_short_and_listed(script: Path) -> None:
    assert len(script.read_text(encoding="utf-8").splitlines()) < 60
    assert f"[{script.name}]({script.name})" in (EXAMPLES / "README.md").read_text(encoding="utf-8")
