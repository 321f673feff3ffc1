"""The contents of a report follow the schema, and equal numbers that are computed in another way."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate, import_model_from_safetensors
from quark_tiny_model import calibration_batches, tiny_model, tiny_model_dir
from quark_workbench.report import ReportOptions, read_report
from quark_workbench.report.export_report import export_report
from quark_workbench.report.files import report_schema, violations

from .reports import contents, exported

RUNS = [("int4_wo_64",), ("mxfp4",), ("int4_wo_64", "gptq"), ("int4_wo_64", "awq", "gptaq")]


def ratio(signal: Tensor, noise: Tensor) -> float:
    return 10 * math.log10(float(signal.double().square().sum() / noise.double().square().sum()))


def test_every_field_of_the_schema_is_described_where_its_name_does_not_say_it() -> None:
    layer = report_schema()["$defs"]["layer"]["properties"]
    assert set(contents("int4_wo_64", "gptq")["layers"][0]) - set(layer) <= {"shrinkage", "output_mse", "correction_share"}


@pytest.mark.parametrize("scheme", ["int4_wo_64", "mxfp4"])
def test_the_ratio_of_weights_is_that_of_the_two_checkpoints(scheme: str) -> None:
    floats = load_file(tiny_model_dir() / "model.safetensors")
    rounded = import_model_from_safetensors(None, exported(scheme), device="cpu").state_dict()
    layers = contents(scheme)["layers"]
    assert len(layers) == 21
    for layer in layers:
        weight, other = floats[f"{layer['name']}.weight"], rounded[f"{layer['name']}.weight"]
        # Layers above 32,768 elements are sampled: rows, spread evenly.
        assert layer["snr_db"] == pytest.approx(ratio(weight, weight.float() - other.float()), abs=0.2), layer["name"]
        assert layer["weights"] == weight.numel()


def test_the_ratio_of_a_small_weight_is_exact() -> None:
    floats = load_file(tiny_model_dir() / "model.safetensors")
    rounded = import_model_from_safetensors(None, exported("int4_wo_64"), device="cpu").state_dict()
    small = [layer for layer in contents("int4_wo_64")["layers"] if layer["weights"] <= 1 << 15]
    assert small
    for layer in small:
        weight = floats[f"{layer['name']}.weight"]
        assert layer["snr_db"] == pytest.approx(ratio(weight, weight.float() - rounded[f"{layer['name']}.weight"].float()), abs=1e-3)


@pytest.mark.parametrize("scheme", ["int4_wo_64", "mxfp4"])
def test_sizes_are_those_of_the_files(scheme: str) -> None:
    out, sizes = exported(scheme), contents(scheme)["sizes"]
    stored, floats = load_file(out / "model.safetensors"), load_file(tiny_model_dir() / "model.safetensors")
    assert sizes["stored_bytes"] == sum(t.nbytes for t in stored.values())
    assert sizes["float_bytes"] == sum(t.nbytes for t in floats.values())
    assert sizes["stored_bytes"] == sum(kind["stored_bytes"] for kind in sizes["kinds"])
    assert sizes["float_bytes"] == sum(kind["float_bytes"] for kind in sizes["kinds"])
    names = [layer["name"] for layer in contents(scheme)["layers"]]
    bits = 8 * sum(t.nbytes for n, t in stored.items() if n.startswith(tuple(f"{name}." for name in names)))
    assert sizes["effective_bits"] == pytest.approx(bits / sum(floats[f"{name}.weight"].numel() for name in names))


def test_files_have_the_hashes_of_their_content() -> None:
    out = exported("int4_wo_64")
    listed = {file["name"]: file for file in contents("int4_wo_64")["files"]}
    assert set(listed) == {path.name for path in out.iterdir()} - {"quark_report.json", "quark_report.html", "quark_run.json"}
    for path in (out / name for name in listed):
        assert listed[path.name]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        assert listed[path.name]["bytes"] == path.stat().st_size


def test_the_settings_of_layers_name_the_algorithm_that_rounds_them() -> None:
    runs = (("int4_wo_64",), ("int4_wo_64", "gptq"))
    plain, by_gptq = ([row["quantized_to"] for row in contents(*run)["settings"]["layers"]] for run in runs)
    assert set(plain) == {"float", "W int4/group 64"}
    assert by_gptq == [text if text == "float" else f"{text}, by gptq" for text in plain]


def test_outputs_are_measured_before_and_after_the_algorithm() -> None:
    layers = contents("int4_wo_64", "gptq")["layers"]
    assert all(layer["output_snr_db"] is not None and layer["tokens"] == 512 for layer in layers)
    for layer in layers:
        # `held_out_error` is the quotient of the two squared errors.
        assert layer["output_snr_db"] - layer["nearest_snr_db"] == pytest.approx(-10 * math.log10(layer["held_out_error"]), abs=1e-3)


@pytest.mark.parametrize("run", [("int4_wo_64", "gptaq"), ("int4_wo_64", "gptq")], ids="-".join)
def test_the_error_through_depth_is_that_of_the_two_models(run: tuple[str, ...]) -> None:
    """In a run with two streams it is measured there, in another afterwards, if the report is to be full."""
    is_measured_in_run = "gptaq" in run
    depth = contents(*run, level="standard" if is_measured_in_run else "full")["depth"]
    assert depth["measured"] == "in the run"
    out = exported(*run, level="standard" if is_measured_in_run else "full")
    both = tiny_model(torch.bfloat16), import_model_from_safetensors(None, out, device="cpu")
    states: list[list[Tensor]] = [[], []]
    with torch.no_grad():
        for tokens in calibration_batches(4, 128):
            for model, found in zip(both, states, strict=True):
                seen: list[Tensor] = []
                hooks = [b.register_forward_hook(lambda m, a, y, s=seen: s.append(y)) for b in model.model.layers]  # type: ignore[union-attr]
                model(tokens)
                [hook.remove() for hook in hooks]
                found.append(torch.stack([s.float().flatten(0, -2) for s in seen]))
    expected, got = (torch.cat(found, 1) for found in states)  # [blocks, tokens, channels]
    relative = ((got - expected).square().sum(-1) / expected.square().sum(-1)).mean(-1)
    assert [row["tokens"] for row in depth["blocks"]] == [512] * 3
    assert [row["relative_error"] for row in depth["blocks"]] == pytest.approx(relative.tolist(), rel=2e-2)  # bfloat16


def test_a_report_of_a_run_without_data_says_so() -> None:
    report = contents("int4_wo_64")
    assert report["depth"] == {"measured": None, "blocks": []}
    assert report["settings"]["calibration"] == {"samples": 0, "tokens": 0, "two_passes": False}
    assert all(layer["output_snr_db"] is None for layer in report["layers"])


def test_the_phases_have_all_the_time_of_the_blocks() -> None:
    time = contents("int4_wo_64", "gptq")["time"]
    by_phase = {phase["phase"]: phase["seconds"] for phase in time["phases"]}
    assert {"load", "forward", "statistics", "solve", "write", "report"} <= by_phase.keys()
    assert sum(by_phase.values()) == pytest.approx(sum(sum(row["seconds"].values()) for row in time["blocks"]))
    assert sum(by_phase.values()) < time["seconds"]
    assert all(phase["share_of_limit"] is None or 0 < phase["share_of_limit"] <= 1 for phase in time["phases"])


def test_the_work_of_forwards_and_statistics_is_counted() -> None:
    report = contents("int4_wo_64", "gptq")
    blocks = [layer for layer in report["layers"] if layer["block"]]
    phases = {phase["phase"]: phase for phase in report["time"]["phases"]}
    assert phases["forward"]["flops"] == 2 * 512 * sum(layer["weights"] for layer in blocks)
    # One Hessian for each input: q/k/v and gate/up share theirs.
    inputs = [layer["columns"] for layer in blocks if layer["kind"].rpartition(".")[2] in ("q_proj", "o_proj", "gate_proj", "down_proj")]
    held_out = 512 - phases["statistics"]["flops"] / sum(k * (k + 1) for k in inputs)
    assert 0 <= held_out < 128


def test_histograms_are_of_the_worst_layers_and_count_what_was_sampled() -> None:
    report = contents("int4_wo_64", "gptq")
    ratios = sorted(layer["snr_db"] for layer in report["layers"])[:8]
    names = {layer["name"]: layer["snr_db"] for layer in report["layers"]}
    weights = {layer["name"]: layer["weights"] for layer in report["layers"]}
    assert [names[entry["layer"]] for entry in report["histograms"]] == ratios
    for entry in report["histograms"]:
        count, size = sum(entry["weight"]["float"]), weights[entry["layer"]]
        assert count == sum(entry["weight"]["rounded"])
        assert (count == size) if size <= 1 << 15 else (1 << 15) / 3 <= count <= 1 << 15
        assert entry["input"] is not None


def test_a_report_of_another_version_is_refused(tmp_path: Path) -> None:
    from quark.errors import CheckpointError

    (tmp_path / "quark_report.json").write_text('{"format": "quark-report", "format_version": 99}')
    with pytest.raises(CheckpointError, match="another version"):
        read_report(tmp_path)
    assert read_report(tmp_path / "none") is None


def test_a_report_of_a_mixture_knows_its_experts(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
    )
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(tmp_path / "float")
    settings = LLMTemplate.get("qwen3_moe").get_config(scheme="mxfp4", algorithm=["gptq"])
    quantize_checkpoint(tmp_path / "float", tmp_path / "out", settings, calibration_batches(2, 64), report=ReportOptions("full"))
    report = read_report(tmp_path / "out")
    assert report is not None
    tokens = report["experts"]["tokens"]
    assert len(tokens) == 2 * 4 * 3
    # Two of the experts get each token, and each of them has three layers.
    assert sum(tokens.values()) == 2 * 3 * 2 * 128
    assert len(report["depth"]["blocks"]) == 2
    assert {layer["kind"] for layer in report["layers"] if ".experts." in layer["name"]} == {
        f"mlp.experts.*.{name}_proj" for name in ("gate", "up", "down")
    }
    (tmp_path / "out" / "quark_report.json").unlink()
    again = export_report(tmp_path / "out", tmp_path / "float")
    assert [layer["snr_db"] for layer in again["layers"]] == [layer["snr_db"] for layer in report["layers"]]
    assert again["sizes"] == report["sizes"]


def test_blocks_that_were_tuned_have_their_errors_before_and_after() -> None:
    report = contents("int4_wo_64", "tuning")
    assert [(row["name"], row["algorithm"]) for row in report["tunings"]] == [(block, "tuning") for block in report["model"]["blocks"]]
    assert any(row["applied"] for row in report["tunings"])
    for row in report["tunings"]:
        assert row["snr_after_db"] == pytest.approx(-10 * math.log10(row["error_after"]))
        assert (row["snr_after_db"] > row["snr_before_db"]) or not row["applied"]
    assert list(violations(report)) == []
