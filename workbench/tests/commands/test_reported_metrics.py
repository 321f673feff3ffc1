"""A full report has the metrics of ``quark evaluate`` that fit the model, and those that plugins register."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from typer.testing import CliRunner

from quark.plugins import Catalog, MetricRecord, Source, hookimpl, using
from quark.plugins.discovery import discover
from quark_tiny_model import held_out_text, tiny_model_dir
from quark_workbench.cli.main import program
from quark_workbench.report.files import violations

OF_TOKENS = ["KL divergence in nats per token", "top-1 agreement", "perplexity"]
REGISTERED = ["accuracy", "entropy", "total_variation"]


def quark(*arguments: object) -> dict[str, Any]:
    """Run the program, and return its result."""
    done = CliRunner().invoke(program(), [*map(str, arguments), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def evaluation(directory: Path) -> dict[str, Any]:
    """Return the metrics of a report that follows its schema, and whose page shows each of them."""
    report = json.loads((directory / "quark_report.json").read_text())
    assert list(violations(report)) == []
    page = (directory / "quark_report.html").read_text()
    assert all(f">{figure['name']}</th>" in page for figure in report["evaluation"]["figures"])
    found: dict[str, Any] = report["evaluation"]
    return found


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    parts = [part for part in held_out_text().split("\n\n") if len(part) > 200][:12]
    path.write_text("".join(json.dumps({"text": part}) + "\n" for part in parts), encoding="utf-8")
    return path


def values(found: dict[str, Any]) -> dict[str, float]:
    return {figure["name"]: figure["value"] for figure in found["figures"]}


def margin(log_q: Tensor, targets: Tensor, log_p: Tensor | None = None) -> Tensor:
    best = log_q.topk(2).values
    return best[:, 0] - best[:, 1]


def broken(log_q: Tensor, targets: Tensor, log_p: Tensor | None = None) -> Tensor:
    return torch.full(targets.shape, math.nan)


@pytest.fixture(params=[margin, broken])
def brought(request: pytest.FixtureRequest) -> Iterator[str]:
    name: str = request.param.__name__

    class Plugin:
        @hookimpl
        def quark_register_metrics(self) -> Iterator[MetricRecord]:
            yield MetricRecord(name=name, metric=f"{__name__}:{name}")

    catalog = Catalog(discover())
    catalog.add(Plugin(), Source("acme-quant", "0.1", entry_point="acme"))
    with using(catalog):
        yield name


def test_predicted_tokens_are_compared_on_the_sequences_of_the_run(text: Path, tmp_path: Path, brought: str) -> None:
    out, data = tmp_path / "out", ("--calib", text, "--num-calib", 5, "--seq-len", 48)
    quark("quantize", tiny_model_dir(), out, "--scheme", "int4_wo_64", "--report", "full", *data)
    found = evaluation(out)
    names = [*OF_TOKENS, *sorted([*REGISTERED, brought])] if brought == "margin" else OF_TOKENS
    assert (found["samples"], [figure["name"] for figure in found["figures"]]) == (5, names)
    kl, top1, perplexity = found["figures"][:3]
    assert 0.001 < kl["value"] < 0.2
    assert 0.5 < top1["value"] < 1
    assert 1 < perplexity["float"] < 100
    assert perplexity["value"] != perplexity["float"]
    assert all(figure["error"] > 0 for figure in found["figures"])
    reasons = [] if brought == "margin" else ["registered metrics are left out", "broken", "acme-quant"]
    assert all(part in found.get("reason", "") for part in reasons)
    assert ("reason" in found) == (brought == "broken")


def test_the_figures_are_those_of_evaluate(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quark("quantize", tiny_model_dir(), out, "--scheme", "int4_wo_64")
    assert json.loads((out / "quark_report.json").read_text())["evaluation"] is None
    whole = tmp_path / "whole.txt"
    whole.write_text(held_out_text()[:8000], encoding="utf-8")
    for number in (2, 6):
        quark("report", out, "--float", tiny_model_dir(), "--calib", whole, "--num-calib", number, "--seq-len", 64)
        judged = quark("evaluate", out, "--reference", tiny_model_dir(), "--text", whole, "--seq-len", 64, "--limit", number)
        found = evaluation(out)
        assert found["samples"] == number
        assert values(found)["perplexity"] == pytest.approx(judged["perplexity"], rel=1e-6)
        assert values(found)["KL divergence in nats per token"] == pytest.approx(judged["mean_kl"], rel=1e-5)
    kept = evaluation(out)
    quark("report", out)
    assert evaluation(out) == kept


SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 1024}
FITTING = {
    "LlamaModel": ["cosine of embeddings", "nearest text is the same"],
    "LlamaForSequenceClassification": ["agreement of classes", "KL divergence in nats"],
    "BertForMaskedLM": ["cosine of logits", "relative error of logits"],
}


@pytest.mark.parametrize("name", FITTING)
def test_other_models_have_the_metric_that_fits(name: str, text: Path, tmp_path: Path) -> None:
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    kind(kind.config_class(**SMALL, num_labels=3, pad_token_id=0)).save_pretrained(tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(tiny_model_dir()).save_pretrained(tmp_path / "model")
    found: list[dict[str, Any]] = []
    for scheme in ("int2_wo_32", "int8_wo_32"):
        out = tmp_path / scheme
        quark("quantize", tmp_path / "model", out, "--scheme", scheme, "--report", "full", "--calib", text, "--num-calib", 7)
        found.append(evaluation(out))
        assert (found[-1]["samples"], [figure["name"] for figure in found[-1]["figures"]]) == (7, FITTING[name])
    far, near = (values(one) for one in found)
    agreement, other = FITTING[name]
    assert far[agreement] <= near[agreement] <= 1
    assert near[agreement] > 0.99
    assert far[other] != near[other]
    assert name == "LlamaModel" or 0 < near[other] < far[other] / 32, "six bits more: an error falls by about 2⁶"


def test_a_model_without_a_fitting_metric_says_why(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quark("quantize", tiny_model_dir(), out, "--scheme", "int4_wo_64")
    short = tmp_path / "short.jsonl"
    short.write_text('{"text": "I"}\n', encoding="utf-8")
    quark("report", out, "--float", tiny_model_dir(), "--calib", short, "--seq-len", 1)
    found = evaluation(out)
    assert (found["samples"], found["figures"]) == (0, [])
    assert "no sequence of the data has two tokens" in found["reason"]
    assert "Not measured: no sequence of the data" in (out / "quark_report.html").read_text()


def test_metrics_that_fail_leave_the_report_and_are_measured_once(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    measured: list[Path] = []

    def fails(out: Path, *_: object, **__: object) -> None:
        measured.append(out)
        raise OSError("no space")

    command = ("quantize", tiny_model_dir(), tmp_path / "out", "--scheme", "int4_wo_64", "--report", "full", "--calib", text, "--resume")
    with monkeypatch.context() as patch:
        patch.setattr("quark_workbench.commands.reported_metrics.reported_metrics", fails)
        quark(*command, "--num-calib", 2, "--seq-len", 16)
    assert "The report has no metrics (OSError: no space)" in caplog.text
    assert json.loads((tmp_path / "out/quark_report.json").read_text())["evaluation"] is None
    quark(*command, "--num-calib", 2, "--seq-len", 16)
    first = evaluation(tmp_path / "out")
    assert first["samples"] == 2
    quark(*command, "--num-calib", 3, "--seq-len", 16)
    assert evaluation(tmp_path / "out") == first
    assert measured == [tmp_path / "out"]
