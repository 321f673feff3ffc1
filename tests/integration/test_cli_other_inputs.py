"""Models that take images or sounds, on the command line: before weights are read it says that Python takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quark.models.hf import loading
from quark.models.hf.file_tensors import FileTensors
from quark_tiny_model import tiny_tokenizer
from tests.kit.model_classes import random_model

from .program import run

TAKES = {
    "WhisperForConditionalGeneration": "input_features",
    "WhisperForAudioClassification": "input_features",
    "ViTForImageClassification": "pixel_values",
    "Wav2Vec2ForCTC": "input_values",
    "CLIPModel": "pixel_values",
}
IN_PYTHON, BATCHES = "run the model and its reference in Python", "or batches in Python"
COMMANDS: dict[str, tuple[list[str], str]] = {
    "quantize": (
        ["quantize", "model", "out", "--scheme", "int8", "--calib", "text.txt"],
        "for activations with static scales",
    ),
    "quantize without data": (["quantize", "model", "out", "--scheme", "int8"], "for activations with static scales"),
    "plan": (["plan", "model", "--scheme", "int8", "--no-probe"], "for activations with static scales"),
    "plan with data": (
        ["plan", "model", "--scheme", "int8", "--no-probe", "--calib", "text.txt"],
        BATCHES,
    ),
    "evaluate": (["evaluate", "model", "--text", "text.txt"], IN_PYTHON),
    "compare": (
        ["evaluate", "model", "--text", "text.txt", "--reference", "model"],
        IN_PYTHON,
    ),
}


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("a weight is read")


@pytest.mark.parametrize("has_tokenizer", [True, False])
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", TAKES)
@pytest.mark.one_in(2)
def test_a_command_that_reads_text_refuses_them_and_says_the_way(
    name: str, command: str, has_tokenizer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    random_model(name).save_pretrained(tmp_path / "model")  # type: ignore[operator]
    if has_tokenizer:
        tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("In the beginning was the word. " * 100)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "load_model", refuse)
    monkeypatch.setattr(FileTensors, "reading", refuse)
    arguments, way = COMMANDS[command]
    assert run(*arguments, monkeypatch=monkeypatch) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"a {name} needs the input '{TAKES[name]}', so texts alone are not enough: " in said
    assert way in said
    assert "copy tokenizer.json" not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", TAKES)
def test_what_needs_no_data_is_done(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_model(name).save_pretrained(tmp_path / "model")  # type: ignore[operator]
    assert run("plan", tmp_path / "model", "--scheme", "ptpc_fp8", "--no-probe", monkeypatch=monkeypatch) == 0
    assert run("quantize", tmp_path / "model", tmp_path / "out", "--scheme", "ptpc_fp8", monkeypatch=monkeypatch) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()
