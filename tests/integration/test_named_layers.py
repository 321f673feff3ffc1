"""Layers that the template leaves in float and a user names on the command line: head and embedding, tied or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from quark.torch import import_model_from_safetensors
from quark_tiny_model import tiny_model, tiny_model_dir

from .program import run
from .test_export_reload import logits

HEAD, EMBEDDING = "lm_head=ptpc_fp8", "model.embed_tokens=int4_wo_64"


@pytest.fixture(params=["tied", "untied"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "tied":
        return tiny_model_dir()
    model = tiny_model(blocks=1)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 1.5)
    model.save_pretrained(tmp_path / "source")
    return tmp_path / "source"


@pytest.mark.parametrize("layers", [[HEAD], [EMBEDDING], [HEAD, EMBEDDING]], ids=["head", "embedding", "both"])
def test_a_head_and_an_embedding_that_are_named_are_quantized_and_reload(
    layers: list[str], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [word for layer in layers for word in ("--layer", layer)]
    assert run("quantize", source, tmp_path / "out", "--scheme", "int4_wo_64", *options, "--strict", monkeypatch=monkeypatch) == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["tie_word_embeddings"] is False, "the plan says what unties"
    assert ("lm_head" in written["quantization_config"]["exclude"]) is (HEAD not in layers)
    ours = import_model_from_safetensors(None, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    for name, layer in (("lm_head", HEAD), ("model.embed_tokens", EMBEDDING)):
        assert type(ours.get_submodule(name)).__name__.startswith("Quant") is (layer in layers), name
    assert torch.equal(logits(ours), logits(theirs))
    assert bool(logits(ours).isfinite().all())


def test_a_pattern_that_also_matches_other_layers_leaves_to_the_template_what_it_excludes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--scheme", "int4_wo_64", "--layer", "*=ptpc_fp8", "--strict", "--dry-run", "--json")
    assert run("quantize", tiny_model_dir(), tmp_path / "out", *arguments, monkeypatch=monkeypatch) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["lm_head"]["config"] is None
    assert rows["model.layers.0.mlp.up_proj"]["config"] is not None


def test_two_words_of_the_user_that_contradict_each_other_are_told_of_and_refused_if_strict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        "quantize",
        tiny_model_dir(),
        tmp_path / "out",
        "--scheme",
        "int4_wo_64",
        "--layer",
        HEAD,
        "--exclude",
        "lm_head",
        "--dry-run",
    )
    assert run(*arguments, monkeypatch=monkeypatch) == 0
    assert run(*arguments, "--strict", monkeypatch=monkeypatch) != 0
    said = capsys.readouterr()
    assert "(lm_head): exclude 'lm_head'" in said.err + said.out
