"""No path of the machine gets into what is exported, by any route."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, Gemma3Config

from quark.checkpoint import ExportOptions
from quark.checkpoint.export import export_with
from quark.config.templates.template import LLMTemplate
from quark.runs.from_disk import quantize_checkpoint
from quark.torch import ModelQuantizer
from quark_tiny_model import tiny_model_dir

from .program import run

pytestmark = pytest.mark.thorough

MARK = "alice-on-host7"
"""A folder above everything that a run reads and writes."""
ROUTES: dict[str, tuple[object, ...]] = {
    "report": ("--scheme", "int4_wo_64"),
    "no report": ("--scheme", "int4_wo_64", "--no-report"),
    "calibrated": ("--scheme", "int4_wo_64", "--algorithm", "gptq", "--calib", "{text}", "--report", "full"),
    "source of data": ("--scheme", "fp8", "--calib", "text", "--calib-option", "path={text}"),
    "mixed": ("--mixed", "fp8,mxfp4", "--target-bits", 6, "--calib", "{text}", "--curve", "{curve}"),
    "spilled": ("--scheme", "int4_wo_64", "--algorithm", "gptq", "--calib", "{text}", "--spill-directory", "{base}"),
    "rotation": ("--scheme", "int8", "--algorithm", "rotation", "--calib", "{text}"),
    "gguf": ("--scheme", "int4_wo_32", "--exporter", "gguf"),
    "no metrics": ("--scheme", "int4_wo_32", "--exporter", "gguf", "--calib", "{text}", "--report", "full"),
    "compressed_tensors": ("--scheme", "int4_wo_64", "--exporter", "compressed_tensors"),
    "fp8": ("--scheme", "fp8", "--exporter", "fp8", "--calib", "{text}"),
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    base = tmp_path / MARK
    shutil.copytree(tiny_model_dir(), base / "models/m")
    (base / "text.txt").write_text("A short text, said again and again. " * 300)
    return base


def telling(out: Path) -> list[str]:
    """The files that have the name of the folder in them."""
    files = [path for path in out.rglob("*") if path.is_file()]
    assert files
    return [path.name for path in files if MARK.encode() in path.read_bytes()]


@pytest.mark.parametrize("route", ROUTES)
def test_no_command_writes_where_it_was_run(route: str, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(base / "models"))
    places = {"{text}": str(base / "text.txt"), "{curve}": str(base / "curve.json"), "{base}": str(base / "models")}
    arguments = [places.get(str(a), str(a).replace("{text}", places["{text}"])) for a in ROUTES[route]]
    more = ("--num-calib", 2, "--seq-len", 64) if "--calib" in arguments else ()
    assert run("quantize", base / "models/m", base / "out", *arguments, *more, monkeypatch=monkeypatch) == 0
    assert not telling(base / "out")
    if route == "spilled":
        assert "--spill-directory '~'" in json.loads((base / "out/quark_report.json").read_text())["settings"]["command"]
    if route == "no metrics":
        assert "reason" in json.loads((base / "out/quark_report.json").read_text())["evaluation"]
    if route == "report":
        assert "quark quantize m out --scheme int4_wo_64" in json.loads((base / "out/quark_report.json").read_text())["settings"]["command"]
        assert run("report", base / "out", "--float", base / "models/m", monkeypatch=monkeypatch) == 0
        assert not telling(base / "out")


@pytest.mark.parametrize("exporter", ["safetensors", "gguf", "onnx", "awq", "compressed_tensors"])
def test_no_export_of_a_model_in_memory_says_where_it_was(exporter: str, base: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base / "models/m", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(base / "models/m")
    scheme = "uint4_wo_32" if exporter == "awq" else "int4_wo_32"
    model = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme=scheme)).quantize_model(model)
    if exporter == "onnx":
        pytest.importorskip("onnxscript")
    export_with(exporter, model, base / "out", ExportOptions(tokenizer=tokenizer))
    assert not telling(base / "out")


@pytest.mark.parametrize("route", ["disk", "memory"])
def test_no_part_of_a_config_says_where_it_was(route: str, base: Path) -> None:
    text = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=text | {"head_dim": 32, "vocab_size": 64},
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        **{"image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7},
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(base / "parts")
    (base / "parts/LICENSE").write_text("free")
    quantization = LLMTemplate.get("gemma3").get_config(scheme="int4_wo_32")
    if route == "disk":
        quantize_checkpoint(base / "parts", base / "out", quantization)
    else:
        model: Any = AutoModelForImageTextToText.from_pretrained(base / "parts")
        model.config.text_config.name_or_path = str(base / "parts")
        export_with("safetensors", ModelQuantizer(quantization).quantize_model(model), base / "out")
    assert not telling(base / "out")
