"""AMD Quark's script, run by this project: its flags, their effects, and refused flags."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from amd_quark_scripts.arguments import argument_parser, check_arguments
from amd_quark_scripts.quantize_quark import main, with_group_size
from quark.config.templates import LLMTemplate
from quark.errors import ConfigError, UnsupportedError
from quark.plugins import Catalog, templates, using
from quark.runs import quantize_checkpoint
from quark.torch.quantization import GPTQConfig
from quark_tiny_model import held_out_text, tiny_model_dir, tiny_template

# AMD Quark 0.13's flags with their defaults.
DEFAULTS: dict[str, Any] = {
    "revision": None, "device": "cuda", "multi_gpu": None, "multi_device": False, "model_attn_implementation": "eager",
    "dataset": "pileval", "data_type": "auto", "seq_len": 512, "batch_size": 1, "num_calib_data": 512, "skip_quantization": False,
    "file2file_quantization": False, "quant_scheme": None, "layer_quant_scheme": None, "kv_cache_dtype": None, "min_kv_scale": 0.0,
    "kv_cache_post_rope": False, "attention_dtype": None, "quant_algo": None, "quant_algo_config_file": None, "exclude_layers": None,
    "enable_native_inference": False, "native_linear_mode": "auto", "model_reload": False, "import_model_dir": None, "params_load": False,
    "json_path": None, "safetensors_path": None, "model_export": None, "custom_mode": "quark", "torch_compile": False,
    "pack_method": "reorder", "output_dir": "exported_model", "export_weight_format": "real_quantized",
    "no_keep_prequantized_layers": False, "params_save": False, "save_dir": "model_params", "skip_evaluation": False,
    "evaluation_dataset": "wikitext", "use_ppl_eval_model": False, "save_metrics_to_csv": False,
    "metrics_output_dir": "metrics_output_dir", "tasks": None, "use_ppl_eval_for_kv_cache": False,
    "ppl_eval_for_kv_cache_context_size": 1024, "ppl_eval_for_kv_cache_sample_size": 512, "ppl_eval_for_kv_cache_patch_size": None,
    "eval_batch_size": 1, "max_eval_batch_size": 64, "num_eval_data": -1, "num_fewshot": None, "apply_chat_template": False,
    "use_mlperf_rouge": False, "eval_data_dir": None, "use_tp": False, "trust_remote_code": True,
}  # fmt: skip
LEGACY = {
    "w_fp8_a_fp8": "fp8",
    "w_mxfp4_a_mxfp4": "mxfp4",
    "w_int4_per_group_sym": "int4_wo_128",
    "w_uint4_per_group_asym": "uint4_wo_128",
    "w_int8_a_int8_per_tensor_sym": "int8",
    "w_mxfp6_e3m2_a_mxfp6_e3m2": "mxfp6_e3m2",
    "w_mxfp6_e2m3_a_mxfp6_e2m3": "mxfp6_e2m3",
    "w_bfp16_a_bfp16": "bfp16",
    "w_mx6_a_mx6": "mx6",
}


def run(*arguments: str | Path) -> None:
    main(["--model_dir", str(tiny_model_dir()), "--device", "cpu", *map(str, arguments)])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(held_out_text(), encoding="utf-8")
    return file


def test_the_flags_have_the_documented_defaults() -> None:
    args = vars(argument_parser().parse_args(["--model_dir", "x"]))
    assert {name: args[name] for name in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize(("old", "name"), LEGACY.items())
def test_older_names_of_schemes_are_known(old: str, name: str) -> None:
    assert with_group_size(old, None) == name
    assert old in LLMTemplate.get_supported_schemes()


@pytest.mark.parametrize(
    ("scheme", "size", "name"),
    [
        ("w_int4_per_group_sym", 32, "int4_wo_32"),
        ("w_uint4_per_group_asym", 64, "uint4_wo_64"),
        ("int4_wo_128", 128, "int4_wo_128"),
        ("w_mxfp4_a_mxfp4", 32, "mxfp4"),
    ],
)
def test_a_group_size_chooses_among_schemes(scheme: str, size: int, name: str) -> None:
    assert with_group_size(scheme, size) == name


@pytest.mark.parametrize(("scheme", "size"), [("int4_wo_128", 48), ("mxfp4", 16), ("fp8", 32)])
def test_a_group_size_that_a_scheme_does_not_have_is_refused(scheme: str, size: int) -> None:
    with pytest.raises(ConfigError, match=f"with groups of {size}"):
        with_group_size(scheme, size)


@pytest.mark.parametrize(
    ("flags", "error", "says"),
    [
        (["--use_tp"], UnsupportedError, "quark evaluate --backend vllm"),
        (["--params_load"], ConfigError, "--params_load reads two files: give --json_path and --safetensors_path"),
        (["--evaluation_dataset", "wikitext_gpt_oss_20b"], UnsupportedError, "quark evaluate --text"),
        (["--custom_mode", "nowhere"], UnsupportedError, "needs an exporter of that name"),
        (
            ["--file2file_quantization", "--model_export", "gguf"],
            ConfigError,
            "--file2file_quantization writes only --model_export hf_format",
        ),
        (["--quant_flow", "file2file", "--model_export", "gguf"], ConfigError, "--model_export hf_format"),
        (["--quant_flow", "per_block", "--file2file_quantization"], ConfigError, "contradicts --quant_flow per_block"),
        (["--quant_algo", "awq,smoothquant"], ConfigError, "'awq' and 'smoothquant' .* have the same role"),
        (["--quant_algo_config_file", "awq", "/nowhere.json"], ConfigError, "there is no file '/nowhere.json'"),
    ],
)
def test_flags_that_are_not_offered_are_refused_before_any_work(flags: list[str], error: type[Exception], says: str) -> None:
    args = argument_parser().parse_args(["--model_dir", "/nowhere", "--quant_scheme", "fp8", *flags])
    with pytest.raises(error, match=says):
        check_arguments(args)


def test_exporters_that_are_not_installed_are_refused() -> None:
    args = argument_parser().parse_args(["--model_dir", "/nowhere", "--quant_scheme", "fp8", "--model_export", "onnx"])
    with using(Catalog(())), pytest.raises(UnsupportedError, match="needs the exporter 'onnx': install a plugin"):
        check_arguments(args)


def test_a_missing_scheme_and_a_used_directory_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run("--skip_evaluation")
    assert stop.value.code == 2
    assert "--quant_scheme is missing" in capsys.readouterr().err
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        run("--skip_evaluation", "--quant_scheme", "fp8", "--model_export", "hf_format", "--output_dir", tmp_path)
    assert "not empty" in capsys.readouterr().err


def test_it_writes_the_checkpoint_that_the_python_interface_writes(tmp_path: Path, text: Path) -> None:
    flags = ["--quant_scheme", "w_int4_per_group_sym", "--group_size", "32", "--quant_algo", "gptq", "--model_export", "hf_format"]
    data = ["--dataset", text, "--num_calib_data", 4, "--seq_len", 64]
    run(*flags, *data, "--output_dir", tmp_path / "out", "--skip_evaluation", "--layer_quant_scheme", "*down_proj", "fp8",
        "--model_attn_implementation", "sdpa")  # fmt: skip
    from quark_tiny_model import tiny_tokenizer
    from quark_workbench.data import read_samples, token_sequences

    config = tiny_template().get_config("int4_wo_32", "gptq", layer_config={"*down_proj": "fp8"})
    quantize_checkpoint(tiny_model_dir(), tmp_path / "ours", config, token_sequences(tiny_tokenizer(), read_samples(text), 4, 64))
    written, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "ours"))
    assert written.keys() == ours.keys()
    assert all((written[name] == ours[name]).all() for name in ours)
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_two_exports_lie_in_one_directory(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    flags = ["--quant_scheme", "uint4_wo_32", "--model_export", "hf_format", "--model_export", "gguf", "--skip_evaluation"]
    run(*flags, "--output_dir", tmp_path / "out")
    run(*flags[:4], "--output_dir", tmp_path / "alone", "--skip_evaluation")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {path.name for path in (tmp_path / "alone").iterdir()} | {"llama.gguf"}
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "alone")]
    assert weights[0] == weights[1]


def test_a_second_export_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amd_quark_scripts.quantize_quark.get_model", lambda *_, **__: pytest.fail("the model is loaded"))
    flags = ["--model_export", "hf_format"]
    for second, says in (("gguf", "Layouts that hold this model:"), ("quark_format", "names the exporter 'quark' twice")):
        with pytest.raises(SystemExit):
            run("--skip_evaluation", "--quant_scheme", "fp8", *flags, "--model_export", second, "--output_dir", tmp_path / "out")
        assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_flags_without_effect_are_told(caplog: pytest.LogCaptureFixture, text: Path) -> None:
    flags = ["--multi_gpu", "balanced", "--torch_compile", "--enable_native_inference"]
    run(*flags, "--quant_scheme", "int8", "--dataset", text, "--num_calib_data", 1, "--seq_len", 32, "--skip_evaluation")
    lines = "\n".join(record.message for record in caplog.records)
    assert "--torch_compile is ignored: the model is evaluated without torch.compile" in lines
    assert "--enable_native_inference is ignored: the model is evaluated as it is" in lines
    assert "multi_gpu" in lines


def test_parameters_that_it_saved_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[Any] = []
    monkeypatch.setattr("amd_quark_scripts.quantize_quark.eval_model", lambda args, model, **_: models.append(model))
    monkeypatch.setattr("amd_quark_scripts.arguments.extra", lambda *_: None)
    run("--quant_scheme", "uint4_wo_32", "--params_save", "--save_dir", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama.json", "llama.safetensors"]
    run("--params_load", "--json_path", tmp_path / "llama.json", "--safetensors_path", tmp_path / "llama.safetensors")
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(models[0](ids).logits, models[1](ids).logits)


def test_a_package_for_the_evaluation_is_missed_before_any_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr("amd_quark_scripts.quantize_quark.local_checkpoint", lambda *_: pytest.fail("the model is looked for"))
    with pytest.raises(SystemExit):
        run("--quant_scheme", "int8")
    assert "need the package 'datasets', which is not installed. Install it: pip install" in capsys.readouterr().err


def test_it_takes_a_template_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "family.json"
    file.write_text(json.dumps({"model_type": "llama", "base": "llama", "exclude_layers_name": ["*down_proj"]}))
    try:
        flags = ["--template_file", file, "--quant_scheme", "int4_wo_64", "--file2file_quantization", "--output_dir", tmp_path / "out"]
        run(*flags)
    finally:
        templates().unregister("llama")
    names = load_file(tmp_path / "out" / "model.safetensors")
    assert {name for name in names if name.endswith("down_proj.weight_scale")} == set()
    assert any(name.endswith("up_proj.weight_scale") for name in names)


def test_from_disk_it_takes_calibration_data_too(tmp_path: Path, text: Path) -> None:
    flags = ["--quant_scheme", "fp8", "--kv_cache_dtype", "fp8", "--min_kv_scale", "1.0", "--file2file_quantization"]
    run(*flags, "--dataset", text, "--num_calib_data", 2, "--seq_len", 64, "--output_dir", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert any(name.endswith("input_scale") for name in tensors)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["quant_method"] == "quark"


@pytest.mark.parametrize("flow", ["standard", "file2file", "per_block"])
def test_every_flow_comes_to_the_same_tensors(flow: str, tmp_path: Path) -> None:
    flags = ["--quant_scheme", "int4_wo_64", "--skip_evaluation", "--gpu_resident_blocks", "2", "--output_dir", tmp_path / flow]
    run(*flags, "--quant_flow", flow, "--model_export", "hf_format")
    run(*flags[:-1], tmp_path / "usual", "--model_export", "hf_format")
    usual, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("usual", flow))
    assert ours.keys() == usual.keys()
    assert all(torch.equal(ours[name], usual[name]) for name in usual)


def test_data_that_nothing_needs_are_not_read(tmp_path: Path) -> None:
    run(
        "--quant_scheme",
        "mxfp4",
        "--dataset",
        "/nowhere",
        "--model_export",
        "hf_format",
        "--output_dir",
        tmp_path / "o",
        "--skip_evaluation",
    )
    assert (tmp_path / "o" / "model.safetensors").is_file()


def test_settings_of_an_algorithm_come_from_a_file(tmp_path: Path, text: Path) -> None:
    settings = tmp_path / "gptq.json"
    settings.write_text(json.dumps(GPTQConfig(damp_percent=0.25).to_dict()))
    flags = ["--quant_scheme", "int4_wo_64", "--quant_algo", "gptq", "--quant_algo_config_file", "gptq", settings]
    run(*flags, "--dataset", text, "--num_calib_data", 2, "--seq_len", 64, "--file2file_quantization", "--output_dir", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert [algo["damp_percent"] for algo in config["algo_config"]] == [0.25]


def test_a_reloaded_export_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"text": line} for line in held_out_text()[:12_000].split("\n")]
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *_, **__: rows))
    run("--quant_scheme", "mxfp4", "--model_export", "hf_format", "--output_dir", tmp_path / "out", "--save_metrics_to_csv",
        "--metrics_output_dir", tmp_path / "metrics")  # fmt: skip
    first = capsys.readouterr().out
    run("--model_reload", "--import_model_dir", tmp_path / "out")
    perplexities = [line for out in (first, capsys.readouterr().out) for line in out.splitlines() if "Perplexity" in line]
    assert len(perplexities) == 2
    assert perplexities[0] == perplexities[1]
    assert (tmp_path / "metrics" / "evaluation_metrics.csv").read_text().startswith("Perplexity,")


@pytest.mark.parametrize("keeps", [True, False])
def test_layers_that_come_quantized_stay_so_unless_a_flag_says_otherwise(keeps: bool, tmp_path: Path) -> None:
    source = tmp_path / "source"
    quantize_checkpoint(tiny_model_dir(), source, tiny_template().get_config("int4_wo_32"), exporter="compressed_tensors")
    flags = ["--model_dir", str(source), "--output_dir", str(tmp_path / "out"), "--quant_scheme", "ptpc_fp8"]
    flags += ["--file2file_quantization", "--skip_evaluation", "--exclude_layers", "*self_attn*", "lm_head"]
    main(flags if keeps else [*flags, "--no_keep_prequantized_layers"])
    assert ("model.layers.0.self_attn.q_proj.weight_scale" in load_file(tmp_path / "out/model.safetensors")) == keeps
