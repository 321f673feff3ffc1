"""``quark quantize`` writes a report beside the weights, which no reader minds.

``quark report`` makes one of an export.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from quark.checkpoint import ExportOptions
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate, import_model_from_safetensors
from quark_tiny_model import tiny_model_dir

from .program import run

BOTH = ("quark_report.html", "quark_report.json")


def quantized(out: Path, *options: object, monkeypatch: pytest.MonkeyPatch, scheme: str = "int4_wo_64") -> int:
    return run("quantize", tiny_model_dir(), out, "--scheme", scheme, *options, monkeypatch=monkeypatch)


def read(directory: Path) -> dict[str, Any]:
    contents: dict[str, Any] = json.loads((directory / "quark_report.json").read_text())
    return contents


def test_an_export_has_a_report_unless_it_is_not_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert quantized(tmp_path / "with", monkeypatch=monkeypatch) == 0
    assert quantized(tmp_path / "without", "--no-report", monkeypatch=monkeypatch) == 0
    names = {path.name for path in (tmp_path / "without").iterdir()}
    assert {path.name for path in (tmp_path / "with").iterdir()} == names | {*BOTH}
    for name in names:
        assert (tmp_path / "with" / name).read_bytes() == (tmp_path / "without" / name).read_bytes(), name
    assert "--scheme int4_wo_64" in read(tmp_path / "with")["settings"]["command"]


def test_no_reader_minds_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert quantized(tmp_path / "out", monkeypatch=monkeypatch) == 0
    tokens = torch.arange(32)[None]
    with torch.no_grad():
        ours = import_model_from_safetensors(None, tmp_path / "out", device="cpu")(tokens).logits
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)(tokens).logits
    assert torch.equal(ours, theirs.to(ours.dtype))


def test_a_report_goes_with_the_export_that_it_is_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert quantized(out, monkeypatch=monkeypatch) == 0
    assert quantized(out, monkeypatch=monkeypatch) == 2
    assert "not empty" in capsys.readouterr().err
    config = LLMTemplate.get("llama").get_config(scheme="mxfp4")
    quantize_checkpoint(tiny_model_dir(), out, config, options=ExportOptions(overwrite=True))
    assert not (out / "quark_report.html").exists()


def test_a_report_that_is_not_there_is_an_error_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantized(tmp_path / "out", "--report", "fulll", monkeypatch=monkeypatch) == 2
    assert "'fulll'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_report_that_cannot_be_written_leaves_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr("quark_workbench.report.run_report.write_report", fails)
    assert quantized(tmp_path / "out", monkeypatch=monkeypatch) == 0
    assert load_file(tmp_path / "out" / "model.safetensors")
    assert "No report was written" in caplog.text


def test_the_report_of_an_export_is_made_anew_from_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert quantized(out, monkeypatch=monkeypatch) == 0
    first = read(out)
    for name in BOTH:
        (out / name).unlink()
    assert run("report", out, monkeypatch=monkeypatch) == 0
    assert "quark_report.html" in capsys.readouterr().out
    again = read(out)
    assert again["sizes"] == first["sizes"]
    assert again["files"] == first["files"]
    assert all(layer["snr_db"] is None for layer in again["layers"])


def test_an_export_is_compared_with_its_float_checkpoint(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    assert quantized(out, monkeypatch=monkeypatch) == 0
    first = read(out)
    for name in BOTH:
        (out / name).unlink()
    arguments = ("--float", tiny_model_dir(), "--calib", text, "--seq-len", 64, "--to", tmp_path / "report")
    assert run("report", out, *arguments, monkeypatch=monkeypatch) == 0
    again = read(tmp_path / "report")
    keys = ("name", "snr_db", "scale_ratio", "peak_to_rms", "bits")
    assert [[layer[key] for key in keys] for layer in again["layers"]] == [[layer[key] for key in keys] for layer in first["layers"]]
    assert again["histograms"] == first["histograms"]
    assert again["depth"]["measured"] == "afterwards"
    assert len(again["depth"]["blocks"]) == 3
    assert not any((out / name).exists() for name in BOTH)


def test_what_a_run_has_measured_is_kept(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    options = ("--algorithm", "gptq", "--calib", text, "--num-calib", 2, "--seq-len", 64)
    assert quantized(out, *options, monkeypatch=monkeypatch) == 0
    first = read(out)
    assert run("report", out, "--float", tiny_model_dir(), "--calib", text, "--seq-len", 64, monkeypatch=monkeypatch) == 0
    again = read(out)
    assert again["layers"] == first["layers"]
    assert again["time"] == first["time"]
    assert [row["tokens"] for row in again["depth"]["blocks"]] == [256] * 3


def test_weights_that_a_transform_has_changed_are_not_compared(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    assert quantized(out, "--algorithm", "rotation", monkeypatch=monkeypatch) == 0
    for name in BOTH:
        (out / name).unlink()
    assert run("report", out, "--float", tiny_model_dir(), "--calib", text, "--seq-len", 64, monkeypatch=monkeypatch) == 0
    again = read(out)
    assert all(layer["snr_db"] is None for layer in again["layers"])
    assert again["depth"]["blocks"] == []
    assert "basis" in again["depth"]["reason"]


def test_text_without_a_float_model_is_refused(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("report", tmp_path, "--calib", text, monkeypatch=monkeypatch) == 2
    assert "--float" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["[]", "{", '{"format": "quark-report", "format_version": 1}'])
def test_a_damaged_report_is_one_paragraph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    (tmp_path / "quark_report.json").write_text(damage)
    assert run("report", tmp_path, monkeypatch=monkeypatch) == 2
    error = capsys.readouterr().err
    assert "quark_report.json" in error
    assert "defect of quark" not in error
