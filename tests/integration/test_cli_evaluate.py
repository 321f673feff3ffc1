"""``quark evaluate`` from the outside: metrics of a float and a quantized checkpoint, and bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
from transformers import AutoTokenizer, LlamaModel
from typer.testing import CliRunner

from quark.checkpoint.export import export_with
from quark.errors import QuarkError
from quark.models.hf.loading import load_model
from quark.models.layers.packed_weight import PackedWeight
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark_tiny_model import calibration_batches, tiny_model_dir, tiny_tokenizer
from quark_workbench.commands import evaluate, quantize

app = typer.Typer()
app.command("evaluate")(evaluate.evaluate)
app.command("quantize")(quantize.quantize)  # a program of one command would take its name for an argument
SHORT = ["--seq-len", "64", "--limit", "4"]


def run(*arguments: str | Path) -> dict[str, float]:
    done = CliRunner().invoke(app, ["evaluate", *map(str, arguments), "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_bundled_text_is_the_default():
    found = run(tiny_model_dir(), *SHORT)
    assert (found["windows"], found["tokens"]) == (4, 4 * 63)
    assert 1 < found["perplexity"] < 100


def test_a_model_compared_with_itself_agrees(tmp_path: Path):
    (tmp_path / "text.txt").write_text("In the beginning God created the heaven and the earth. " * 40)
    found = run(tiny_model_dir(), "--reference", tiny_model_dir(), "--text", tmp_path / "text.txt", *SHORT)
    assert (found["mean_kl"], found["p99_kl"], found["top1_agreement"]) == (0, 0, 1)
    assert found["perplexity"] == found["reference_perplexity"]


def test_a_quantized_checkpoint_is_read_and_differs_from_its_reference(tmp_path: Path):
    quantized = CliRunner().invoke(
        app, ["quantize", str(tiny_model_dir()), str(tmp_path / "q"), "--scheme", "int4_wo_32"], catch_exceptions=False
    )
    assert quantized.exit_code == 0
    found = run(tmp_path / "q", "--reference", tiny_model_dir(), *SHORT)
    assert 0 < found["mean_kl"] < found["p99_kl"] < 1
    assert 0.8 < found["top1_agreement"] < 1


@pytest.mark.parametrize("how", [[], ["--by-block"]])
def test_a_checkpoint_that_runs_from_codes_has_the_same_figures(how: list[str], tmp_path: Path):
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_32")
    export_safetensors(ModelQuantizer(config).quantize_model(load_model(tiny_model_dir())), tmp_path / "q")
    tiny_tokenizer().save_pretrained(tmp_path / "q")
    before = PackedWeight.values
    unpacked: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedWeight, "values", lambda self, out=None: unpacked.append(self.name) or before(self, out))
        packed = run(tmp_path / "q", *SHORT, "--packed", *how)
    plain = run(tmp_path / "q", *SHORT, *how)
    assert "model.layers.0.mlp.up_proj" in unpacked, "it does run from codes"
    assert (packed["perplexity"], packed["tokens"]) == (plain["perplexity"], plain["tokens"])


@pytest.mark.parametrize("how", [[], ["--packed"]])
@pytest.mark.parametrize(("scheme", "layout"), [("uint4_wo_32", "awq"), ("fp8", "fp8"), ("int4_wo_32", "compressed_tensors")])
def test_an_export_that_transformers_reads_by_another_library_is_read_here(
    scheme: str, layout: str, how: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    out, config = tmp_path / "out", LLMTemplate.get("llama").get_config(scheme=scheme)
    export_with(layout, ModelQuantizer(config).quantize_model(load_model(tiny_model_dir()), calibration_batches(2, 64)), out)
    tiny_tokenizer().save_pretrained(out)
    found = run(out, *SHORT, *how)
    assert f"quark's reader of the layout '{layout}' reads" in caplog.text
    assert found["perplexity"] == run(out, *SHORT, "--by-block")["perplexity"]


def test_a_window_with_more_tokens_than_a_batch_is_a_batch(monkeypatch: pytest.MonkeyPatch):
    found = run(tiny_model_dir(), "--dtype", "float32", *SHORT)
    monkeypatch.setattr(evaluate, "_TOKENS_AT_A_TIME", 48)
    alone = run(tiny_model_dir(), "--dtype", "float32", *SHORT)
    assert (alone["windows"], alone["tokens"]) == (found["windows"], found["tokens"])
    assert alone["perplexity"] == pytest.approx(found["perplexity"], rel=1e-5)


def test_people_get_sentences():
    done = CliRunner().invoke(app, ["evaluate", str(tiny_model_dir()), "--reference", str(tiny_model_dir()), *SHORT])
    assert "perplexity" in done.stdout
    assert "100.00%" in done.stdout


def without_tokenizer(folder: Path) -> Path:
    made = shutil.copytree(tiny_model_dir(), folder / "bare")
    for file in made.glob("tokenizer*"):
        file.unlink()
    return made


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--seq-len", "-4"], "at least 2"),
        (["--limit", "0"], "at least 1"),
        (["--seq-len", "5000"], "exceed the context"),
        (["--dtype", "int3"], "dtype"),
        (["--device", "nowhere"], "device"),
        (["--reference", "/nowhere/at/all"], "no such directory"),
        (["--text", "/nowhere/at/all.txt"], "is not a file, a directory or a data source"),
    ],
)
def test_bad_options_are_refused_with_the_reason(options: list[str], says: str):
    with pytest.raises(QuarkError, match=says):
        CliRunner().invoke(app, ["evaluate", str(tiny_model_dir()), "--limit", "2", *options], catch_exceptions=False)


def test_bad_models_and_texts_are_refused_with_the_reason(tmp_path: Path):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "short.txt").write_text("In the beginning")
    tiny = tiny_model_dir()
    for arguments, says in [
        ([tmp_path / "missing"], "no such directory"),
        ([tmp_path], "no config.json"),
        ([without_tokenizer(tmp_path)], "no tokenizer"),
        ([tiny, "--text", tmp_path / "empty.txt"], "holds no text"),
        ([tiny, "--text", tmp_path / "short.txt"], "fewer than one window"),
    ]:
        with pytest.raises(QuarkError, match=says):
            CliRunner().invoke(app, ["evaluate", *map(str, arguments)], catch_exceptions=False)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The body of the bundled model, with its tokenizer."""
    path = tmp_path_factory.mktemp("embedder")
    LlamaModel.from_pretrained(tiny_model_dir()).save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny_model_dir()).save_pretrained(path)
    return path


def test_an_embedder_is_judged_by_the_cosine_of_its_embeddings(embedder: Path, tmp_path: Path) -> None:
    runner, out = CliRunner(), str(tmp_path / "out")
    assert (
        runner.invoke(app, ["quantize", str(embedder), out, "--scheme", "int4_wo_64", "--no-report"], catch_exceptions=False).exit_code == 0
    )
    arguments = [out, "--reference", str(embedder), "--limit", "6"]
    figures: Any = run(*arguments)["figures"]
    assert (figures["kind"], figures["metric"], figures["texts"]) == ("embedder", "cosine of embeddings", 6)
    assert 0.5 < figures["lowest"] < figures["value"] < 1
    lines = runner.invoke(app, ["evaluate", *arguments], catch_exceptions=False).stdout
    assert f"cosine of embeddings: {figures['value']:.5f} ± " in lines
    with pytest.raises(QuarkError, match="leave out --by-block"):
        runner.invoke(app, ["evaluate", *arguments, "--by-block"], catch_exceptions=False)
