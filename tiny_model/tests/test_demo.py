"""``quark demo``: every scheme that fits the bundled model is quantized, exported, loaded and compared."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import quark
from quark.errors import OutputError
from quark_tiny_model import demo
from quark_tiny_model.demo_run import Bench, Refusal
from quark_workbench.cli.main import program


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Rows of the demo on fewer tokens than it takes by default, and where its checkpoints are."""
    out, few = tmp_path_factory.mktemp("demo") / "out", Bench.bundled(count=8, length=64, new_tokens=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bench, "bundled", lambda: few)
        done = CliRunner().invoke(program(), ["demo", "--out", str(out), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.stdout
    return json.loads(done.stdout), out


@pytest.mark.thorough
def test_every_scheme_has_a_row_and_the_float_model_the_first(shown: tuple[dict[str, Any], Path]):
    rows = shown[0]["rows"]
    assert rows[0]["name"] == "float"
    assert set(quark.schemes().names()) <= {row["name"] for row in rows}
    assert shown[0]["refused"] == []


@pytest.mark.thorough
def test_one_row_has_a_quantized_cache(shown: tuple[dict[str, Any], Path]):
    assert sum("KV cache" in row["name"] for row in shown[0]["rows"]) == 1


@pytest.mark.thorough
def test_every_export_reads_back_to_the_same_logits(shown: tuple[dict[str, Any], Path]):
    assert all(row["reload_equal"] for row in shown[0]["rows"])


@pytest.mark.thorough
def test_effective_bits_count_scales_and_zero_points(shown: tuple[dict[str, Any], Path]):
    bits = {row["name"]: row["size"]["bits"] for row in shown[0]["rows"]}
    assert bits["float"] == 16
    assert bits["int4_wo_128"] == pytest.approx(4 + 32 / 128 + 4 / 128)  # float32 scale and a stored 4-bit zero point per group
    assert bits["mxfp4_weight_only"] == 4 + 8 / 32
    assert 8 < bits["fp8"] < 8.01


@pytest.mark.thorough
def test_quantizing_costs_something_and_not_much(shown: tuple[dict[str, Any], Path]):
    rows = {row["name"]: row for row in shown[0]["rows"]}
    reference = rows.pop("float")
    assert reference["comparison"]["mean_kl"] == 0
    for row in rows.values():
        assert row["size"]["total_bytes"] < reference["size"]["total_bytes"]
        assert 0 < row["comparison"]["mean_kl"] < 1
    assert rows["int4_wo_32"]["comparison"]["mean_kl"] < rows["int4_wo_per_channel"]["comparison"]["mean_kl"]
    assert rows["fp8"]["comparison"]["mean_kl"] < rows["mxfp4"]["comparison"]["mean_kl"]


@pytest.mark.thorough
def test_the_checkpoints_that_are_kept_can_be_evaluated(shown: tuple[dict[str, Any], Path]):
    done = CliRunner().invoke(program(), ["evaluate", str(shown[1] / "fp8"), "--limit", "2", "--json"], catch_exceptions=False)
    assert json.loads(done.stdout.splitlines()[-1])["perplexity"] > 1


def test_a_used_directory_is_refused_before_any_work(tmp_path: Path):
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(OutputError):
        CliRunner().invoke(program(), ["demo", "--out", str(tmp_path)], catch_exceptions=False)
    assert [f.name for f in tmp_path.iterdir()] == ["mine.txt"]


def test_a_scheme_that_breaks_is_told_apart_from_one_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bench = Bench.bundled(count=1, length=8)
    unknown, _ = bench.try_scheme("no_such_scheme", None, tmp_path / "a")
    assert isinstance(unknown, Refusal)
    assert unknown.expected

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a defect of the plugin")

    monkeypatch.setattr("quark_tiny_model.demo_run.export_safetensors", broken)
    failed, _ = bench.try_scheme(quark.schemes().names()[0], None, tmp_path / "b")
    assert isinstance(failed, Refusal)
    assert (failed.expected, failed.reason) == (False, "ZeroDivisionError: a defect of the plugin")


def test_the_table_has_a_line_for_each_scheme_and_compares_all_but_the_first() -> None:
    size = SimpleNamespace(weight_bytes=2_345_678, total_bytes=3_456_789, bits=4.25)
    comparison = SimpleNamespace(perplexity=12.345, mean_kl=0.01234, top1_agreement=0.912)
    rows: Any = [
        SimpleNamespace(name=name, size=size, comparison=comparison, seconds=1.5, reload_equal=equal)
        for name, equal in (("float", True), ("int4_wo_32", True), ("mxfp4", False))
    ]
    console = Console(width=110, record=True, file=StringIO())
    console.print(demo._table(rows))
    lines = [line.split() for line in console.export_text().splitlines() if line.split()[:1] in (["float"], ["int4_wo_32"], ["mxfp4"])]
    assert lines == [
        ["float", "2,346", "3,457", "4.25", "12.35"],
        ["int4_wo_32", "2,346", "3,457", "4.25", "12.35", "0.0123", "91.2%", "1.50", "equal"],
        ["mxfp4", "2,346", "3,457", "4.25", "12.35", "0.0123", "91.2%", "1.50", "different"],
    ]


def test_the_demo_calibrates_on_eight_sequences() -> None:
    bench = Bench.bundled(count=2, length=32, new_tokens=1)
    assert sum(batch.shape[0] for batch in bench.calibration) == 8
    assert {batch.shape[1] for batch in bench.calibration} == {128}


def test_without_json_the_demo_prints_its_table_and_why_a_scheme_is_not_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    few = Bench.bundled(count=2, length=32, new_tokens=1)
    monkeypatch.setattr(Bench, "bundled", lambda: few)
    monkeypatch.setattr(Bench, "jobs", lambda self: [("int4_wo_32", None), ("no_such_scheme", None)])
    done = CliRunner().invoke(program(), ["demo"], catch_exceptions=False)
    assert done.exit_code == 0
    assert "The bundled model in each scheme" in done.stdout
    assert any(line.startswith("no_such_scheme: ") for line in done.stdout.splitlines()), "why it has no row"
    assert next(line.split()[-1] for line in done.stdout.splitlines() if line.lstrip().startswith("int4_wo_32 ")) == "equal"
