"""Layers that a layout cannot hold are in the plan, and refuse a run before it asks for data.

The message names the layouts that can.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quark.errors import UnsupportedError
from quark.plugins import ExporterRecord, exporters
from quark.runs import quantize_checkpoint
from quark_devkit.small_models import run_config, saved, small_model
from quark_workbench.planning.planned_run import plan

CANNOT = [("awq", "ptpc_fp8"), ("fp8", "mxfp4"), ("compressed_tensors", "mxfp4_fp8"), ("gguf", "ptpc_fp8")]


@pytest.mark.parametrize(("layout", "scheme"), CANNOT)
def test_a_plan_says_what_the_layout_cannot_hold(layout: str, scheme: str, tmp_path: Path) -> None:
    if layout == "gguf":
        pytest.importorskip("gguf")
    planned = plan(saved(tmp_path / "float"), run_config(scheme), exporter=layout, probing=False)
    (refusal,) = [refusal for refusal in planned.refusals if refusal.kind == "UnsupportedError"]
    assert "model.layers.{0-1}.self_attn.q_proj" in refusal.message
    assert "Layouts that hold this model: " in refusal.message
    assert "safetensors" in refusal.message.rpartition("Layouts that hold")[2]
    assert planned.plan is not None


def test_a_plan_that_a_layout_holds_has_its_files(tmp_path: Path) -> None:
    planned = plan(saved(tmp_path / "float"), run_config("int4_wo_64"), exporter="awq", probing=False)
    assert planned.refusals == ()
    assert planned.estimate is not None
    assert planned.estimate.output is not None
    # Codes, for each group of 64 a scale in 16 bits and a zero point in 4, and biases in 16 bits.
    layers = [m for n, m in small_model().named_modules() if isinstance(m, torch.nn.Linear) and ".layers." in n]
    biases = sum(16 * m.bias.numel() for m in layers if m.bias is not None) / sum(m.weight.numel() for m in layers)
    assert planned.estimate.output.bits_per_quantized_weight == pytest.approx(4 + (16 + 4) / 64 + biases)


def test_a_run_is_refused_before_data_are_asked_for(tmp_path: Path) -> None:
    def data(_: Any) -> Any:
        raise AssertionError("data were asked for")

    with pytest.raises(UnsupportedError, match="the layout 'awq' cannot hold this model"):
        quantize_checkpoint(saved(tmp_path / "float"), tmp_path / "out", run_config("int8"), data, exporter="awq")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("record", [one for one in exporters() if one.exporter is not None], ids=lambda one: one.name)
def test_a_plan_holds_one_block_or_says_that_it_holds_the_whole_model(record: ExporterRecord, tmp_path: Path) -> None:
    for package in {"gguf": ("gguf",), "onnx": ("onnx", "onnxscript")}.get(record.name, ()):
        pytest.importorskip(package)
    scheme = "ptpc_fp8" if record.name == "safetensors" else "fp8" if record.name == "fp8" else "int4_wo_32"
    planned = plan(saved(tmp_path / "float"), run_config(scheme), exporter=record.name, probing=False)
    assert planned.estimate is not None
    assert ("one block" in planned.estimate.memory) == ("streaming" in record.capabilities)
    assert ("the whole model" in planned.estimate.memory) == ("streaming" not in record.capabilities)
