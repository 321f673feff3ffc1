"""Models that see or hear, on the command line: full reports, reports of an export, and mixed schemes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from .media_program import LLAVA, WHISPER, Program

TOKENS = ["KL divergence in nats per token", "top-1 agreement", "perplexity", "accuracy", "entropy", "total_variation"]
NAMES = {LLAVA: TOKENS, WHISPER: ["word error rate", "difference of word error rates", *TOKENS]}
BLOCKS = {
    LLAVA: [f"model.language_model.layers.{number}" for number in range(2)],
    WHISPER: [f"model.{part}.layers.{number}" for part in ("encoder", "decoder") for number in range(2)],
}
QUICK = ("--selector-option", "points=5", "--selector-option", "measured_tokens=64")


@pytest.fixture(params=[LLAVA, WHISPER])
def program(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    return Program(request.param, tmp_path, monkeypatch, capsys)


def blocks_of(names: Iterable[str]) -> set[str]:
    """Return the names up to the number of a block."""
    return {".".join(name.split(".")[:4]).removesuffix(".self_attn").removesuffix(".mlp") for name in names}


def metrics(report: dict[str, Any]) -> dict[str, Any]:
    return {figure["name"]: figure["value"] for figure in report["evaluation"]["figures"]}


def test_a_full_report_has_layers_depth_and_the_metrics_that_fit(program: Program) -> None:
    out = program.folder / "out"
    options = ("--scheme", "int4_wo_32", "--algorithm", "gptq", "--report", "full", "--num-calib", 3)
    program.quark("quantize", program.model, out, "--calib", program.data, *options)
    report = program.report(out)
    assert blocks_of(layer["name"] for layer in report["layers"]) == {*BLOCKS[program.name]}
    assert len(report["layers"]) == {LLAVA: 2 * 7, WHISPER: 2 * 6 + 2 * 10}[program.name]
    assert all(16 < layer["snr_db"] < 22 for layer in report["layers"]), "4 bits in groups of 32"
    # Twenty tokens of a sentence are too few to hold any out.
    unknown = [layer["name"] for layer in report["layers"] if not 20 < (layer["output_snr_db"] or 0) < 60]
    assert all(".decoder." in name and "encoder_attn.k" not in name for name in unknown)
    assert report["settings"]["calibration"]["samples"] == 3
    assert [row["block"] for row in report["depth"]["blocks"]] == BLOCKS[program.name]
    assert all(15 < row["snr_db"] < 80 for row in report["depth"]["blocks"])
    assert report["evaluation"]["samples"] == 3
    assert [figure["name"] for figure in report["evaluation"]["figures"]] == NAMES[program.name]
    judged = program.evaluate(out, "--reference", program.model, "--limit", 3, "--metric", "entropy")
    assert metrics(report)["KL divergence in nats per token"] == pytest.approx(judged["mean_kl"], rel=1e-6)
    assert metrics(report)["entropy"] == pytest.approx(judged["metrics"]["entropy"]["value"], rel=1e-6)
    assert 1e-6 < judged["mean_kl"] < 0.01
    assert metrics(report).get("word error rate") == judged.get("word_error_rate")


def test_a_report_of_an_export_reads_data_with_options(program: Program) -> None:
    out, moved = program.quantize("out", "--scheme", "int2_wo_32"), program.folder / "rows.jsonl"
    program.data.rename(moved)
    command = ("report", out, "--float", program.model, "--calib", moved)
    assert "there is no file" in program.quark(*command, code=2)
    media, found = ("--calib-option", f"media={program.data.parent}"), []
    for options in (("--num-calib", 2), ("--num-calib", 2, "--calib-seed", 3), ("--num-calib", 4)):
        program.quark(*command, *media, *options)
        report = program.report(out)
        assert report["evaluation"]["samples"] == options[1]
        assert [row["block"] for row in report["depth"]["blocks"]] == BLOCKS[program.name]
        assert [figure["name"] for figure in report["evaluation"]["figures"]] == NAMES[program.name]
        found.append((metrics(report), report["depth"]["blocks"][-1]["tokens"]))
    assert found[0][1] < found[2][1]
    assert len({values["perplexity"] for values, _ in found}) == 3, "two samples, two others, and all"
    assert all(0.001 < values["KL divergence in nats per token"] < 2 for values, _ in found)


def test_schemes_are_mixed_by_what_is_seen_and_heard(program: Program) -> None:
    divergences = []
    for name, choice in {
        "small": ("--scheme", "int2_wo_32"),
        "mixed": ("--mixed", "int2_wo_32,fp8,bf16", "--target-bits", 5, *QUICK),
    }.items():
        out = program.folder / name
        result = program.result("quantize", program.model, out, "--calib", program.data, "--report", "full", *choice)
        divergences.append(metrics(program.report(out))["KL divergence in nats per token"])
    selection = result["selection"]
    assert selection == program.report(out)["selection"]
    assert 4 < selection["bits"] <= 5
    assert blocks_of(selection["choices"]) == {*BLOCKS[program.name]}
    assert {"int2_wo_32", "fp8"} <= set(selection["choices"].values())
    assert all(0 < losses["fp8"] < losses["int2_wo_32"] for losses in selection["losses"].values())
    assert 0 < divergences[1] < divergences[0] / 2
