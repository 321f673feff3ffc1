"""``quark quantize`` from a checkpoint to a checkpoint.

Every bad input is one paragraph with exit code 2, and nothing is written.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AlbertConfig, AlbertForMaskedLM, AutoConfig, AutoModelForCausalLM

from quark_tiny_model import tiny_model_dir

from .program import run


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the bundled model that a test may damage."""
    return Path(shutil.copytree(tiny_model_dir(), tmp_path / "source"))


def test_a_checkpoint_comes_out_with_its_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run("quantize", tiny_model_dir(), out, "--scheme", "int4_wo_64", "--json", monkeypatch=monkeypatch) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["scheme"] == "int4_wo_64"
    assert (out / "tokenizer.json").is_file()
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "quark"
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.get_tensor("model.layers.0.self_attn.q_proj.weight").dtype == torch.int32


def test_static_schemes_take_text(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--scheme", "fp8", "--kv-cache", "fp8", "--calib", text, "--num-calib", 2, "--seq-len", 64)
    assert run("quantize", tiny_model_dir(), tmp_path / "out", *arguments, monkeypatch=monkeypatch) == 0
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["model.layers.0.self_attn.k_proj.output_scale"].numel() == 1


def test_batches_of_samples_of_different_lengths_write_the_bytes_of_the_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are padded, and padding is no token."""
    data = tmp_path / "samples.jsonl"
    data.write_text("".join(json.dumps({"text": "And the evening and the morning were the day. " * n}) + "\n" for n in (3, 1, 4, 2)))
    arguments = ("--scheme", "fp8", "--kv-cache", "fp8", "--calib", data, "--one-sample-per-sequence", "--calib-batch-size")
    for size in (1, 3):
        assert run("quantize", tiny_model_dir(), tmp_path / str(size), *arguments, size, monkeypatch=monkeypatch) == 0
    one, other = ((tmp_path / str(size) / "model.safetensors").read_bytes() for size in (1, 3))
    assert one == other


def test_calibrated_rounding_takes_text_and_asks_for_it(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("quantize", tiny_model_dir(), tmp_path / "out", "--scheme", "int4_wo_64", "--algorithm", "gptq")
    assert run(*arguments, monkeypatch=monkeypatch) == 2
    assert "--calib" in capsys.readouterr().err
    assert run(*arguments, "--calib", text, "--num-calib", 2, "--seq-len", 64, monkeypatch=monkeypatch) == 0


def test_scales_are_shared_or_kept_apart_on_demand(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--scheme", "fp8", "--kv-cache", "fp8", "--calib", text, "--num-calib", 2, "--seq-len", 64)
    options = ("--separate-kv-scales", "--share-fused-scales")
    assert run("quantize", tiny_model_dir(), tmp_path / "out", *arguments, *options, monkeypatch=monkeypatch) == 0
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    block = "model.layers.0."
    assert len({float(tensors[f"{block}self_attn.{p}_proj.weight_scale"]) for p in "qkv"}) == 1
    assert len({float(tensors[f"{block}mlp.{p}_proj.weight_scale"]) for p in ("gate", "up")}) == 1
    assert len({float(tensors[f"{block}self_attn.{p}_proj.output_scale"]) for p in "kv"}) == 2


def test_a_dry_run_prints_the_plan_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--scheme", "int4_wo_64", "--layer", "*.down_proj=uint4_wo_32", "--dry-run")
    assert run("quantize", tiny_model_dir(), tmp_path / "out", *arguments, monkeypatch=monkeypatch) == 0
    printed = capsys.readouterr().out
    assert "uint4/group 32 asym" in printed
    assert "pattern: *.down_proj" in printed
    assert not (tmp_path / "out").exists()


BAD = {
    "an unknown scheme names the closest": (["--scheme", "itn4_wo_64"], "int4_wo_64"),
    "a static scheme without text": (["--scheme", "int8"], "--calib"),
    "a pattern that matches nothing": (
        ["--scheme", "int4_wo_64", "--exclude", "*.qproj", "--strict"],
        "'*.qproj' in exclude matches no layer",
    ),
    "a layer option without a scheme": (["--scheme", "int4_wo_64", "--layer", "*.down_proj"], "PATTERN=SCHEME"),
    "an unknown scheme for a layer": (["--scheme", "int4_wo_64", "--layer", "*.down_proj=fp9"], "fp9"),
    "an unknown cache scheme": (["--scheme", "int4_wo_64", "--kv-cache", "int4_wo_64"], "int4_wo_64"),
    "an unknown algorithm": (["--scheme", "int4_wo_64", "--algorithm", "gtpq"], "gptq"),
    "text that is not there": (["--scheme", "int8", "--calib", "nowhere.txt"], "nowhere.txt"),
    "an unknown dtype": (["--scheme", "int4_wo_64", "--dtype", "float7"], "float7"),
    "an unknown device": (["--scheme", "int4_wo_64", "--device", "toaster"], "toaster"),
    "an unknown exporter": (["--scheme", "int4_wo_64", "--exporter", "safetensor"], "safetensors"),
}


@pytest.mark.parametrize(("options", "words"), BAD.values(), ids=BAD)
def test_bad_options_are_one_paragraph_and_exit_code_2(
    options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("quantize", tiny_model_dir(), tmp_path / "out", *options, monkeypatch=monkeypatch) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_a_group_that_does_not_divide_lists_the_layers_and_what_fits(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((source / "config.json").read_text())
    config["intermediate_size"] = 320
    (source / "config.json").write_text(json.dumps(config))
    assert run("quantize", source, tmp_path / "out", "--scheme", "int4_wo_128", "--dry-run", monkeypatch=monkeypatch) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "3 layer(s) cannot be quantized" in error
    assert ": model.layers.{0-2}.mlp.down_proj." in error
    assert "int4_wo_64" in error


def test_an_output_directory_in_use_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("keep me")
    assert run("quantize", tiny_model_dir(), tmp_path / "out", "--scheme", "int4_wo_64", monkeypatch=monkeypatch) == 2
    assert "not empty" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["precious.txt"]


def test_a_model_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("quantize", tmp_path / "nowhere", tmp_path / "out", "--scheme", "int4_wo_64", monkeypatch=monkeypatch) == 2
    assert "there is no such directory" in capsys.readouterr().err


def test_a_truncated_model_is_refused(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = source / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    assert run("quantize", source, tmp_path / "out", "--scheme", "int4_wo_64", monkeypatch=monkeypatch) == 2
    assert "is truncated" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_weight_that_is_not_finite_is_named(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert run("quantize", source, tmp_path / "out", "--scheme", "int4_wo_64", monkeypatch=monkeypatch) == 2
    assert "model.layers.1.mlp.up_proj.weight" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_quantized_checkpoint_that_no_layout_dequantizes_is_refused(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "of-nobody"}}))
    assert run("quantize", source, tmp_path / "out", "--scheme", "int4_wo_64", monkeypatch=monkeypatch) == 2
    assert "quantized already" in capsys.readouterr().err


def test_a_family_without_a_template_is_quantized_and_says_what_was_inferred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = AlbertConfig(vocab_size=64, embedding_size=64, hidden_size=64, intermediate_size=64, num_attention_heads=2)
    AlbertForMaskedLM(config).save_pretrained(tmp_path / "albert")
    assert run("quantize", tmp_path / "albert", tmp_path / "out", "--scheme", "int4_wo_64", monkeypatch=monkeypatch) == 0
    assert "no template for the model type 'albert'" in caplog.text
    assert "the whole model is one block" in caplog.text
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_an_algorithm_that_needs_a_template_names_the_option_that_gives_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = AlbertConfig(vocab_size=64, embedding_size=64, hidden_size=64, intermediate_size=64, num_attention_heads=2)
    AlbertForMaskedLM(config).save_pretrained(tmp_path / "albert")
    arguments = ("quantize", tmp_path / "albert", tmp_path / "out", "--scheme", "int4_wo_64", "--algorithm", "gptq")
    assert run(*arguments, monkeypatch=monkeypatch) == 2
    assert "--template-file takes a JSON file" in capsys.readouterr().err


def test_a_rival_distribution_in_the_environment_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rival = tmp_path / "site" / "amd_quark-0.13.dist-info"
    rival.mkdir(parents=True)
    (rival / "METADATA").write_text("Metadata-Version: 2.1\nName: amd-quark\nVersion: 0.13\n")
    monkeypatch.syspath_prepend(str(rival.parent))
    assert run("schemes", monkeypatch=monkeypatch) == 2
    error = capsys.readouterr().err
    assert "amd-quark 0.13 is installed" in error
    assert "pip uninstall" in error


def test_a_scheme_takes_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    arguments = (tiny_model_dir(), out, "--scheme", "mx6", "--scheme-option", "block_size=32")
    assert run("quantize", *arguments, monkeypatch=monkeypatch) == 0
    tensors = load_file(out / "model.safetensors")
    assert tensors["model.layers.0.self_attn.q_proj.weight_scale"].shape[1] * 32 == 256


def test_an_option_that_is_no_pair_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (tiny_model_dir(), tmp_path / "out", "--scheme", "mx6", "--scheme-option", "32")
    assert run("quantize", *arguments, monkeypatch=monkeypatch) == 2
    assert "is not KEY=VALUE" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_family_without_a_template_is_quantized_by_what_its_modules_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("persimmon", **sizes)).save_pretrained(tmp_path / "source")
    assert run("quantize", tmp_path / "source", tmp_path / "out", "--scheme", "int4_wo_32", monkeypatch=monkeypatch) == 0
    assert "There is no template for the model type 'persimmon'; this was inferred" in caplog.text
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["model.layers.1.mlp.dense_h_to_4h.weight"].dtype == torch.int32
    assert tensors["lm_head.weight"].dtype == torch.float32
