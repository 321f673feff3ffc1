"""The benchmark of speech models speaks sentences of a text, and compares transcriptions with what was spoken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import word_error_rate
from tests.kit.media_models import media_checkpoint

TEXT = " Here is one. " + " ".join(f"{word.title()} quick brown foxes jump, over a lazy dog." for word in "abcdefghijklmnop")


def test_sentences_of_the_halves_are_different_and_of_plain_words() -> None:
    halves = [word_error_rate.sentences(TEXT, half, 4) for half in (0, 1)]
    assert [len(half) for half in halves] == [4, 4]
    assert not set(halves[0]) & set(halves[1])
    assert all(one in TEXT and 7 <= len(one.split()) <= 20 for half in halves for one in half)
    with pytest.raises(ValueError, match="fewer than 40"):
        word_error_rate.sentences(TEXT, 0, 40)
    assert word_error_rate.sentences("Start. " + "The XML of it has 3 words, and some more of these. " * 9, 0, 0) == []


def test_runs_are_compared_with_the_float_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoken: list[str] = []

    def speak(text: str, language: str) -> torch.Tensor:
        spoken.append(f"{language}: {text}")
        return torch.randn(8000, generator=torch.Generator().manual_seed(len(spoken))) / 10

    monkeypatch.setattr(word_error_rate, "spoken", speak)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    model = media_checkpoint("WhisperForConditionalGeneration", tmp_path / "model")
    command = [str(model), str(tmp_path / "text.txt"), str(tmp_path / "out"), "--sentences", "2"]
    command += ["--runs", "none/int4_wo_32,gptq/int4_wo_32"]
    word_error_rate.main(command)
    assert len(spoken) == 4
    assert all(line.startswith("en: ") for line in spoken)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| float", "| none/int4_wo_32", "| gptq/int4_wo_32"]
    assert (tmp_path / "out/gptq-int4_wo_32/model.safetensors").is_file()
    word_error_rate.main(command)
    assert capsys.readouterr().out.splitlines() == lines
    assert len(spoken) == 4, "what is there is not made again"
