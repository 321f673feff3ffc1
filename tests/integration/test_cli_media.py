"""Models that see or hear, on the command line: calibrated and evaluated on images and sounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from quark.checkpoint.export import export_with
from quark.models.hf.loading import load_model
from quark.models.plan.family import template_of
from quark.runs import ModelQuantizer
from quark_devkit.whole_runs import contents, interrupted_behind
from quark_tiny_model import tiny_model_dir
from quark_workbench.cli.main import program as whole_program
from quark_workbench.data import read_samples
from quark_workbench.data.processor import load_processor
from tests.kit.media_models import HEARING, SEEING, write_sound, write_sounds

from .media_program import LLAVA, WHISPER, Program
from .program import run

CLASSES = [*SEEING, *HEARING]
TOWERS = {**dict.fromkeys(SEEING, "model.visual.blocks.*"), WHISPER: "model.encoder.layers.*"}
TOWERS |= {LLAVA: "model.vision_tower.*.layers.*", "Gemma3ForConditionalGeneration": "model.vision_tower.encoder.layers.*"}
"""The layers of the tower that sees or hears."""


@pytest.fixture
def program(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    return Program(getattr(request, "param", WHISPER), tmp_path, monkeypatch, capsys)


every_class = pytest.mark.parametrize("program", CLASSES, indirect=True)


@every_class
@pytest.mark.parametrize("choices", [{"scheme": "fp8"}, {"scheme": "int4_wo_32", "algorithm": "gptq"}], ids=str)
def test_the_bytes_are_those_of_a_run_in_memory(program: Program, choices: dict[str, str], tmp_path: Path) -> None:
    out = program.quantize("out", *(part for key, value in choices.items() for part in (f"--{key}", value)))
    batches = load_processor(program.model).batches(read_samples(program.data), 128)
    assert len(batches) == 4
    float_model = load_model(program.model)
    config = template_of(float_model).get_config(**choices)
    export_with("safetensors", ModelQuantizer(config).quantize_model(float_model, batches), tmp_path / "memory")
    own, expected = contents(out), contents(tmp_path / "memory")
    assert {own[name] == expected[name] for name in ("model.safetensors", "config.json", "generation_config.json")} == {True}


@pytest.mark.parametrize("program", [LLAVA, WHISPER], indirect=True)
def test_a_run_that_was_killed_goes_on_to_the_same_bytes(program: Program) -> None:
    options = ("--scheme", "int4_wo_32", "--algorithm", "gptq")
    once = program.quantize("once", *options)
    arguments = ["quantize", program.model, program.folder / "out", "--calib", program.data, "--no-report", *options]
    with interrupted_behind(1):
        whole_program()(list(map(str, arguments)), standalone_mode=False)
    assert contents(program.quantize("out", *options, "--resume")) == contents(once)


@every_class
def test_calibration_sees_the_images_and_sounds(program: Program) -> None:
    options = ("--scheme", "fp8", "--layer", f"{TOWERS[program.name]}=fp8")
    out = program.quantize("out", *options)
    changed = program.folder / "data" / ("0.wav" if program.name in HEARING else "pictures/0.png")
    others = [path for path in changed.parent.iterdir() if path.suffix == changed.suffix]
    for path in others:
        path.write_bytes(changed.read_bytes())
    other = program.quantize("other", *options)
    one, two = (load_file(path / "model.safetensors") for path in (out, other))
    moved = [name for name in one if name.endswith("input_scale") and bool((one[name] != two[name]).any())]
    assert moved, "the static scales do not depend on what is seen or heard"


@every_class
def test_a_tower_has_a_scheme_of_its_own(program: Program) -> None:
    pattern = TOWERS[program.name]
    out = program.quantize("out", "--scheme", "int4_wo_32", "--algorithm", "gptq", "--layer", f"{pattern}=fp8")
    tensors = load_file(out / "model.safetensors")
    prefix = pattern.partition("*")[0]
    tower = {name: str(value.dtype) for name, value in tensors.items() if name.startswith(prefix) and name.endswith("proj.weight")}
    decoder = [name for name in tensors if "language_model" in name or ".decoder." in name]
    assert tower
    assert set(tower.values()) == {"torch.float8_e4m3fn"}
    assert {name.removesuffix(".weight") + ".input_scale" for name in tower} <= set(tensors)
    assert {str(tensors[name].dtype) for name in decoder if name.endswith("q_proj.weight")} == {"torch.int32"}
    compared = program.evaluate(out, "--reference", program.model)
    assert 0 < compared["mean_kl"] < 0.5


@pytest.mark.parametrize("program", SEEING, indirect=True)
def test_text_is_judged_given_its_image(program: Program) -> None:
    out = program.quantize("out", "--scheme", "int4_wo_32")
    compared = program.evaluate(out, "--reference", program.model)
    alone = program.evaluate(out)
    assert compared["windows"] == 4
    assert compared["mean_kl"] > 0
    assert alone["perplexity"] == compared["perplexity"]
    same = program.evaluate(program.model, "--reference", program.model, "--limit", 2)
    assert (same["mean_kl"], same["windows"]) == (0, 2)
    by_block = program.evaluate(out, "--reference", program.model, "--by-block")
    assert {key: by_block[key] for key in ("perplexity", "mean_kl")} == {key: compared[key] for key in ("perplexity", "mean_kl")}


def test_a_speech_model_has_a_word_error_rate(program: Program) -> None:
    out = program.quantize("out", "--scheme", "int4_wo_32")
    compared = program.evaluate(out, "--reference", program.model)
    same = program.evaluate(program.model, "--reference", program.model)
    assert compared["words"] == 24
    assert compared["word_error_rate"] > 0
    assert compared["mean_kl"] > 0
    assert (same["word_error_rate_difference"], same["word_error_rate_difference_error"], same["mean_kl"]) == (0, 0, 0)
    alone = program.evaluate(out)
    assert alone["word_error_rate"] == compared["word_error_rate"]
    said = program.quark("evaluate", out, "--text", program.data, "--reference", program.model)
    assert "word error rate over 24 words: " in said
    assert ", reference " in said
    assert "leave out --by-block" in program.quark("evaluate", out, "--text", program.data, "--by-block", code=2)


def test_a_plan_takes_the_data_or_says_what_is_wrong(program: Program) -> None:
    plan = ("plan", program.model, "--scheme", "fp8", "--no-probe", "--calib")
    assert "input_scale" not in program.quark(*plan, program.data)
    (program.folder / "text.txt").write_text("Words alone.")
    assert "needs the input 'input_features', so texts alone are not enough: give --calib rows" in program.quark(
        *plan, program.folder / "text.txt", code=2
    )
    (program.model / "preprocessor_config.json").unlink()
    assert "has no processor for them" in program.quark(*plan, program.data, code=2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: (folder / "2.wav").unlink(), "line 3 of '"),
        (lambda folder: (folder / "2.wav").write_bytes(b"RIFF"), "2.wav', need the package 'soundfile'|2.wav' cannot be read as a sound"),
        (lambda folder: write_sound(folder / "2.wav", rate=8000), "2.wav' has 8000 samples a second, but the model needs 16000"),
    ],
    ids=["missing", "unreadable", "another rate"],
)
def test_a_sound_that_cannot_be_heard_is_named_before_any_work(program: Program, change: Any, said: str) -> None:
    change(program.folder / "data")
    out = program.folder / "out"
    error = program.quark("quantize", program.model, out, "--calib", program.data, "--scheme", "fp8", "--no-report", code=2)
    assert any(part in error for part in said.split("|"))
    assert not out.exists()


def test_samples_run_one_at_a_time(program: Program) -> None:
    options = ("--calib", program.data, "--scheme", "fp8", "--calib-batch-size", 2)
    assert "leave out --calib-batch-size" in program.quark("quantize", program.model, program.folder / "out", *options, code=2)


def test_a_model_of_texts_refuses_sounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_sounds(tmp_path / "data")
    assert run("quantize", tiny_model_dir(), tmp_path / "out", "--scheme", "fp8", "--calib", data, monkeypatch=monkeypatch) == 2
    assert "has no processor for them" in " ".join(capsys.readouterr().err.split())
    assert run("evaluate", tiny_model_dir(), "--text", data, monkeypatch=monkeypatch) == 2
    assert "reads texts alone" in " ".join(capsys.readouterr().err.split())
