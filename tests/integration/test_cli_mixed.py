"""``quark quantize --mixed``: schemes chosen layer by layer, exported, reloaded.

And what is refused before any work.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file

from quark.checkpoint.transformers_loading import register_layouts
from quark.models.hf.loading import load_model
from quark_tiny_model import calibration_batches, tiny_model_dir

from .program import run

QUICK = ("--num-calib", 2, "--seq-len", 64, "--selector-option", "points=5", "--selector-option", "measured_tokens=64")


def quantized(out: Path, text: Path, *arguments: object, monkeypatch: pytest.MonkeyPatch) -> int:
    return run("quantize", tiny_model_dir(), out, "--calib", text, *QUICK, *arguments, monkeypatch=monkeypatch)


def test_a_mixed_checkpoint_is_written_and_loads_again(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, curve = tmp_path / "out", tmp_path / "curve.svg"
    arguments = ("--mixed", "fp8,mxfp4,bf16", "--target-bits", 6, "--curve", curve, "--json")
    assert quantized(out, text, *arguments, monkeypatch=monkeypatch) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    selection = facts["selection"]
    assert selection["bits"] <= 6
    assert sum(tensor.nbytes for tensor in load_file(out / "model.safetensors").values()) == selection["total_bytes"]
    assert ElementTree.parse(curve).getroot().tag.endswith("svg")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    main = config["global_quant_config"]["weight"]["dtype"]
    for group, name in selection["choices"].items():
        for layer in selection["layers"][group]:
            own = config["layer_quant_config"].get(layer, config["global_quant_config"])["weight"]["dtype"]
            assert (layer in config["exclude"]) == (name == "float")
            assert name == "float" or own == {"fp8": "fp8_e4m3", "mxfp4": "fp4"}[name]
    assert main in ("fp8_e4m3", "fp4")
    register_layouts()
    model = load_model(out)
    with torch.no_grad():
        logits = model(calibration_batches(1, 32)[0]).logits
    assert bool(logits.isfinite().all())


def test_one_process_of_several_is_refused_before_data_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)  # as torchrun sets them; nobody answers at that port
    arguments = ("--mixed", "fp8,mxfp4", "--target-bits", 6)
    assert quantized(tmp_path / "out", tmp_path / "no text", *arguments, monkeypatch=monkeypatch) == 2
    assert "--mixed measures and chooses in one process: run it without torchrun" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_curve_is_printed_and_a_dry_run_writes_nothing(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--mixed", "fp8,mxfp4", "--target-size", "1.6MB", "--curve", tmp_path / "curve.json", "--dry-run")
    assert quantized(tmp_path / "out", text, *arguments, monkeypatch=monkeypatch) == 0
    printed = capsys.readouterr().out
    assert "mixed_precision: " in printed
    assert "measured KL" in printed
    assert "chosen" in printed
    assert "Plan: 21 of 23 layers" in printed
    assert not (tmp_path / "out").exists()
    facts = json.loads((tmp_path / "curve.json").read_text())
    assert facts["total_bytes"] <= 1_600_000
    assert facts["budget"] == {"size": 1_600_000}


def test_named_layers_keep_their_scheme(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        "--mixed",
        "mxfp4,bf16",
        "--target-bits",
        5,
        "--layer",
        "*.down_proj=ptpc_fp8",
        "--exclude",
        "*.o_proj",
        "--dry-run",
        "--json",
    )
    assert quantized(tmp_path / "out", text, *arguments, monkeypatch=monkeypatch) == 0
    facts = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row["config"] for row in facts["rows"]}
    assert rows["model.layers.1.mlp.down_proj"]["weight"]["dtype"] == "fp8_e4m3"
    assert rows["model.layers.1.self_attn.o_proj"] is None
    assert not [name for name in facts["selection"]["choices"] if "o_proj" in name or "down_proj" in name]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no scheme is given. Name a scheme, as in --scheme int4_wo_128"),
        (("--scheme", "fp8", "--mixed", "fp8,mxfp4", "--target-bits", 5), "--scheme fp8 sets one scheme"),
        (("--scheme", "fp8", "--target-bits", 5), "--target-bits needs --mixed"),
        (("--mixed", "fp8,mxfp4"), "--mixed needs a budget: add --target-bits 5"),
        (
            ("--mixed", "fp8,mxfp4", "--target-bits", 5, "--kl-budget", 0.1),
            "a selection needs exactly one budget, and bits and kl are given",
        ),
        (("--mixed", "fp8", "--target-bits", 5), "two candidates or more"),
        (("--mixed", "fp8,mxfp5", "--target-bits", 5), "there is no scheme 'mxfp5'. Did you mean"),
        (("--mixed", "fp8,mxfp4", "--target-bits", 2), "they reach 4.25 to 8"),
        (("--mixed", "fp8,mxfp4", "--target-bits", 5, "--selector", "bets"), "bets"),
        (("--mixed", "fp8,mxfp4", "--target-bits", 5, "--selector-option", "sensitivty=kl"), "Did you mean 'sensitivity'?"),
        (("--mixed", "fp8,mxfp4", "--target-bits", 5, "--curve", "curve.png"), "must end in one of .svg, .json"),
        (("--mixed", "fp8,mxfp4", "--target-bits", 5, "--scheme-option", "group_size=32"), "--scheme-option has no effect with --mixed"),
        (("--mixed", "fp8,int4_wo_per_channel", "--target-bits", 5, "--runtime", "vLLM"), "'vLLM' does not load the scheme"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_refused_before_any_work(
    arguments: tuple[object, ...],
    message: str,
    tmp_path: Path,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("quantize", tiny_model_dir(), tmp_path / "out", "--calib", text, *arguments, monkeypatch=monkeypatch) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()
