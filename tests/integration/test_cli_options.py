"""The effect of each option of the command line on the run: tests that notice when one is dropped on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

import quark.runs
from quark.base.version import VERSION
from quark.models.hf.loading import torch_dtype
from quark.models.hf.skeleton import meta_model
from quark.runs.run import plan_run
from quark_tiny_model import tiny_model_dir, tiny_tokenizer
from quark_tiny_model.demo_run import Bench, Refusal
from quark_workbench.cli.main import program

from .program import run


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments that the command gives `quantize_checkpoint`, which does nothing here."""
    found: dict[str, Any] = {}

    def recorded(model: Path, out: Path, config: Any, data: Any, **more: Any) -> Any:
        out.mkdir()
        run = plan_run(meta_model(model), config)
        found.update(more, config=config, data=data(run.needs_data) if run.needs_data else None)
        return run.plan

    monkeypatch.setattr(quark.runs, "quantize_checkpoint", recorded)
    return found


def plan(*arguments: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The plan of a dry run as JSON."""
    assert run("quantize", tiny_model_dir(), "nowhere", *arguments, "--dry-run", "--json", monkeypatch=monkeypatch) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_exclusions_are_added_to_those_of_the_template(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--scheme", "int4_wo_64", "--exclude", "*.v_proj", "--exclude", "*.layers.0.*")
    rows = plan(*options, monkeypatch=monkeypatch, capsys=capsys)["rows"]
    floats = {row["name"] for row in rows if row["config"] is None}
    assert {"lm_head", "model.layers.1.self_attn.v_proj", "model.layers.0.mlp.up_proj"} <= floats
    assert "model.layers.1.mlp.up_proj" not in floats


def test_a_dry_run_gives_its_plan_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan("--scheme", "int4_wo_64", "--algorithm", "gptq", monkeypatch=monkeypatch, capsys=capsys)
    assert found["model_type"] == "llama"
    assert {row["algorithm"] for row in found["rows"] if row["config"]} == {"gptq"}


def test_a_dry_run_reads_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_bytes((tiny_model_dir() / "config.json").read_bytes())
    arguments = ("quantize", tmp_path, tmp_path / "out", "--scheme", "int4_wo_64", "--algorithm", "awq", "--algorithm", "gptq", "--dry-run")
    assert run(*arguments, monkeypatch=monkeypatch) == 0
    assert "21 of 23 layers get a quantized weight" in capsys.readouterr().out


def test_calibration_is_as_much_and_as_long_as_asked(
    tmp_path: Path, text: Path, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--scheme", "fp8", "--calib", text, "--num-calib", 3, "--seq-len", 17)
    assert run("quantize", tiny_model_dir(), tmp_path / "out", *options, monkeypatch=monkeypatch) == 0
    assert [tuple(batch.shape) for batch in asked["data"]] == [(1, 17)] * 3


def test_each_source_of_calibration_gives_as_many_sequences(
    tmp_path: Path, text: Path, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("PATIENCE, n. A minor form of despair, disguised as a virtue. " * 20)
    options = ("--scheme", "fp8", "--seq-len", 17, "--calib", text, "--calib", other, "--num-calib")
    assert run("quantize", tiny_model_dir(), tmp_path / "out", *options, 3, monkeypatch=monkeypatch) == 0
    expected = [tiny_tokenizer()(file.read_text(), verbose=False)["input_ids"][:34] for file in (text, other)]
    assert torch.cat(asked["data"]).flatten().tolist() == expected[0] + expected[1][:17]
    assert run("quantize", tiny_model_dir(), tmp_path / "few", *options, 1, monkeypatch=monkeypatch) == 2
    assert "less than one sequence for each of the 2" in capsys.readouterr().err


def test_the_run_works_on_the_device_that_is_asked_for(asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--scheme", "int4_wo_64", "--device", "cpu:0")
    assert run("quantize", tiny_model_dir(), tmp_path / "out", *flags, monkeypatch=monkeypatch) == 0
    assert str(asked["device"]) == "cpu:0"


@pytest.mark.parametrize("flag", [True, False])
def test_all_experts_are_calibrated_where_that_is_asked(
    flag: bool, tmp_path: Path, text: Path, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--scheme", "fp8", "--calib", text, *(["--calibrate-all-experts"] if flag else []))
    assert run("quantize", tiny_model_dir(), tmp_path / "out", *options, monkeypatch=monkeypatch) == 0
    assert asked["config"].calibrate_all_experts is flag


def test_activations_go_where_that_is_asked(
    tmp_path: Path, text: Path, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--scheme", "int4_wo_64", "--algorithm", "gptq", "--calib", text, "--activation-memory", "2MB")
    run_options = (*options, "--spill-directory", tmp_path)
    assert run("quantize", tiny_model_dir(), tmp_path / "out", *run_options, monkeypatch=monkeypatch) == 0
    assert (asked["config"].activation_memory, asked["config"].spill_directory) == (2_000_000, str(tmp_path))
    capsys.readouterr()
    assert "each block runs twice" in " ".join(plan(*options, monkeypatch=monkeypatch, capsys=capsys)["notes"])
    assert run("plan", tiny_model_dir(), *options, "--spill-directory", tmp_path / "missing", monkeypatch=monkeypatch) == 2
    assert "is not a directory. Create it" in capsys.readouterr().err


def test_every_algorithm_that_is_named_is_applied_with_its_options(
    tmp_path: Path, text: Path, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--scheme", "int4_wo_64", "--calib", text, "--algorithm", "awq", "--algorithm", "gptq")
    settings = ("--algorithm-option", "gptq.damp_percent=0.25", "--algorithm-option", "awq.preset=reference")
    assert run("quantize", tiny_model_dir(), tmp_path / "out", *options, *settings, monkeypatch=monkeypatch) == 0
    awq, gptq = asked["config"].algo_config
    assert (awq.name, awq.preset, gptq.name, gptq.damp_percent) == ("awq", "reference", "gptq", 0.25)
    assert gptq.inside_layer_modules, "what the template says of the family stays"


def test_options_of_a_scheme_are_of_their_own_type(tmp_path: Path, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--scheme", "mx6", "--scheme-option", "block_size=32")
    assert run("quantize", tiny_model_dir(), tmp_path / "out", *options, monkeypatch=monkeypatch) == 0
    assert asked["config"].global_quant_config.weight.group_size == 32


def test_options_of_an_exporter_reach_what_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def export(name: str, *options: str) -> Path:
        given = [part for option in options for part in ("--exporter-option", option)]
        assert run("quantize", tiny_model_dir(), tmp_path / name, "--scheme", "int4_wo_64", *given, monkeypatch=monkeypatch) == 0
        return tmp_path / name

    plain = export("plain")
    ordered = export("ordered", "pack_method=order", "max_shard_bytes=500000")
    assert len(list(plain.glob("*.safetensors"))) == 1
    assert len(list(ordered.glob("*.safetensors"))) > 1
    assert json.loads((ordered / "config.json").read_text())["quantization_config"]["export"]["pack_method"] == "order"
    floats = export("floats", "weight_format=fake_quantized")
    with safe_open(floats / "model.safetensors", "pt") as file:
        assert file.get_tensor("model.layers.0.mlp.up_proj.weight").is_floating_point()


WRONG = {
    "no option of the scheme": (["--scheme-option", "blok_size=16"], "has no option 'blok_size'. Did you mean 'block_size'?"),
    "another type for a scheme": (["--scheme-option", "block_size=1.5"], "needs int for the option 'block_size', not 1.5 (float)"),
    "no option of the algorithm": (["--algorithm", "gptq", "--algorithm-option", "gptq.damp=1"], "has no option 'damp'"),
    "another type for an algorithm": (["--algorithm", "gptq", "--algorithm-option", "gptq.desc_act=0"], "needs bool"),
    "a value that it refuses": (["--algorithm", "gptq", "--algorithm-option", "gptq.damp_percent=2"], "refuses damp_percent=2.0"),
    "an algorithm that is not applied": (["--algorithm-option", "gptq.desc_act=true"], "applies none: name 'gptq' as an algorithm too"),
    "an algorithm that is not there": (["--algorithm-option", "gtpq.desc_act=true"], "Did you mean 'gptq'?"),
    "no option of the exporter": (["--exporter-option", "pack_methd=order"], "Did you mean 'pack_method'?"),
    "another type for an exporter": (["--exporter-option", "zero_points=yes"], "needs bool for the option 'zero_points'"),
    "a choice that it does not have": (["--exporter-option", "pack_method=foo"], "use one of reorder, order"),
    "a number out of its range": (["--exporter-option", "max_shard_bytes=0"], "refuses max_shard_bytes=0: 'max_shard_bytes' must be > 0"),
}


@pytest.mark.parametrize(("options", "words"), WRONG.values(), ids=WRONG)
def test_wrong_options_are_told_before_any_work(
    options: list[str],
    words: str,
    tmp_path: Path,
    asked: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("quantize", tiny_model_dir(), tmp_path / "out", "--scheme", "mx6", *options, monkeypatch=monkeypatch) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert not asked


def test_the_dtype_of_an_evaluation_is_that_of_the_reference_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = tiny_model_dir()
    arguments = ("evaluate", tiny, "--reference", tiny, "--dtype", "float32", "--limit", 2, "--seq-len", 32, "--json")
    assert run(*arguments, monkeypatch=monkeypatch) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["mean_kl"] == 0


@pytest.mark.parametrize(("fault", "code"), [(None, 0), ("reload", 1), ("scheme", 1), ("no fit", 0)])
def test_the_demonstration_fails_if_a_reload_differs_or_a_scheme_breaks(
    fault: str | None, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, attempt = Bench.bundled(count=1, length=16), Bench.try_scheme
    monkeypatch.setattr(Bench, "bundled", lambda: small)
    monkeypatch.setattr(Bench, "jobs", lambda bench: [("int4_wo_64", None), ("mx6", None)])
    if fault == "reload":
        monkeypatch.setattr("quark_tiny_model.demo_run._same_logits", lambda *models: False)
    elif fault is not None:
        refusal = Refusal(name="mx6", reason="a test", expected=fault == "no fit")
        monkeypatch.setattr(Bench, "try_scheme", lambda bench, *a: (refusal, ()) if a[0] == "mx6" else attempt(bench, *a))
    assert CliRunner().invoke(program(), ["demo"], catch_exceptions=False).exit_code == code


def test_the_version_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version", monkeypatch=monkeypatch) == 0
    assert capsys.readouterr().out == f"quark {VERSION}\n"


def test_a_dtype_that_is_not_there_is_told_without_the_words_of_the_command_line() -> None:
    assert torch_dtype("float16") is torch.float16
    with pytest.raises(ValueError, match=r"^the dtype 'int3' cannot be used: use auto, float32, bfloat16, float16$"):
        torch_dtype("int3")
