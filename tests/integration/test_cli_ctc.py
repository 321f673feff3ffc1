"""CTC models of speech, on the command line: word error rate, report, mixed schemes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quark.models.hf.loading import load_model
from quark_workbench.data import read_samples
from quark_workbench.data.processor import load_processor
from quark_workbench.evaluate.sample_windows import sample_windows
from quark_workbench.evaluate.word_error_rate import transcripts, words_of
from tests.kit.media_models import SPELLING

from .media_program import Program


@pytest.fixture(params=SPELLING)
def program(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    """The program with sounds whose words are those that the float model hears."""
    made = Program(request.param, tmp_path, monkeypatch, capsys)
    processor, samples = load_processor(made.model), list(read_samples(made.data))
    texts = transcripts(load_model(made.model), processor, sample_windows(processor, samples), samples)
    rows = [{"audio": f"{number}.wav", "text": text.lower()} for number, text in enumerate(texts)]
    made.data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return made


def test_the_word_error_rate_is_of_what_the_frames_spell(program: Program) -> None:
    words = sum(len(words_of(json.loads(line)["text"])) for line in program.data.read_text().splitlines())
    same = program.evaluate(program.model)
    assert words > 4
    assert (same["words"], same["word_error_rate"], same["windows"]) == (words, 0, 4)
    assert "perplexity" not in same
    out = program.quantize("out", "--scheme", "int2_wo_32")
    compared = program.evaluate(out, "--reference", program.model)
    assert (compared["reference_word_error_rate"], compared["words"]) == (0, words)
    assert 0 < compared["word_error_rate"] == compared["word_error_rate_difference"] < 2
    assert 0.5 < compared["outputs"]["logits"]["cosine"] < 1
    near = program.evaluate(program.quantize("near", "--scheme", "int8_wo_32"), "--reference", program.model)
    assert near["word_error_rate"] < compared["word_error_rate"]
    said = program.quark("evaluate", out, "--text", program.data, "--reference", program.model)
    assert ", 4 sample(s), " in said
    assert f"word error rate over {words} words: " in said
    assert f"word error rate over {words} words: 0.00%" in program.quark("evaluate", program.model, "--text", program.data)


def test_what_a_ctc_model_does_not_have_is_refused(program: Program) -> None:
    command = ("evaluate", program.model, "--text", program.data)
    assert "predicts none: leave out --metric" in program.quark(*command, "--metric", "accuracy", code=2)
    assert "leave out --by-block" in program.quark(*command, "--by-block", code=2)
    program.data.write_text('{"audio": "0.wav"}\n', encoding="utf-8")
    assert "does not predict tokens, so it has no perplexity" in program.quark(*command, code=2)
    assert program.evaluate(program.model, "--reference", program.model)["outputs"]["logits"]["relative_error"] == 0


def test_calibrated_and_mixed_checkpoints_have_reports_with_the_rate(program: Program) -> None:
    rates = []
    for name, choice in {
        "small": ("--scheme", "int2_wo_32", "--algorithm", "gptq"),
        "mixed": ("--mixed", "fp8,bf16", "--target-bits", 12),
    }.items():
        program.quark("quantize", program.model, program.folder / name, "--calib", program.data, "--report", "full", *choice)
        report = program.report(program.folder / name)
        figures = report["evaluation"]["figures"]
        assert [figure["name"] for figure in figures[:3]] == ["word error rate", "difference of word error rates", "cosine of logits"]
        assert (report["evaluation"]["samples"], figures[0]["float"]) == (4, 0)
        chosen = report["selection"]
        floats = (
            [] if chosen is None else [n for group, one in chosen["choices"].items() if one == "float" for n in chosen["layers"][group]]
        )
        assert len(report["layers"]) == 2 * 6 - len(floats)
        rates.append(figures[0]["value"])
    assert rates[1] <= rates[0]
    assert rates[0] > 0
    assert 0 < len(floats) < 6
    assert 8 < report["selection"]["bits"] <= 12
    assert all(losses["fp8"] > 0 for losses in report["selection"]["losses"].values())
