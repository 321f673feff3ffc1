"""Checkpoints of NVIDIA ModelOpt and bitsandbytes as sources: recordings of these libraries, and damage."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from quark.errors import CheckpointError, UnsupportedError
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate
from quark_exporters.bitsandbytes import BitsAndBytesDequantizer
from quark_exporters.modelopt import ModelOptDequantizer

GOLDEN = Path(__file__).parent / "golden_sources"
CLOSE = 1e-6
"""Relative: values are computed in float32 there and here, perhaps with other roundings of a factor."""


def test_the_recordings_are_those_of_the_manifest() -> None:
    manifest = json.loads((GOLDEN / "MANIFEST.json").read_text(encoding="utf-8"))
    assert {name: hashlib.sha256((GOLDEN / name).read_bytes()).hexdigest() for name in manifest["sha256"]} == manifest["sha256"]


@pytest.mark.parametrize("form", ["fp8", "nvfp4", "int8"])
def test_a_source_has_the_logits_of_its_library(form: str, tmp_path: Path) -> None:
    config = LLMTemplate.get("qwen2").get_config(scheme="int4_wo_32", exclude_layers=["*"])
    quantize_checkpoint(GOLDEN / form, tmp_path / "out", attrs.evolve(config, keep_prequantized_layers=False), dtype="float32")
    of_model = AutoConfig.from_pretrained(tmp_path / "out")
    del of_model.quantization_config
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", config=of_model, dtype=torch.float32)
    recorded = load_file(GOLDEN / form / "expected.safetensors")
    with torch.no_grad():
        logits = model(recorded["ids"]).logits
    assert float((logits - recorded["logits"]).norm()) <= CLOSE * float(recorded["logits"].norm())


def test_layers_of_fp8_stay_as_they_are(tmp_path: Path) -> None:
    config = LLMTemplate.get("qwen2").get_config(scheme="int4_wo_32", exclude_layers=["*"])
    quantize_checkpoint(GOLDEN / "fp8", tmp_path / "out", config)
    before, after = load_file(GOLDEN / "fp8" / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    codes = {name for name, tensor in before.items() if tensor.dtype is torch.float8_e4m3fn}
    assert len(codes) == 14
    assert all(torch.equal(after[name].view(torch.uint8), before[name].view(torch.uint8)) for name in codes)


def of_layer(form: str) -> tuple[dict[str, Any], dict[str, Tensor], type[Any]]:
    block = json.loads((GOLDEN / form / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    layer = "model.layers.0.mlp.up_proj."
    stored = load_file(GOLDEN / form / "model.safetensors")
    own = {name.removeprefix(layer): tensor for name, tensor in stored.items() if name.startswith(layer)}
    return (
        block,
        {f"up.{leaf}": tensor for leaf, tensor in own.items()},
        ModelOptDequantizer if form == "nvfp4" else BitsAndBytesDequantizer,
    )


@pytest.mark.parametrize(
    ("form", "leaf"), [("nvfp4", "weight"), ("nvfp4", "weight_scale"), ("nvfp4", "weight_scale_2"), ("int8", "weight"), ("int8", "SCB")]
)
def test_tensors_that_do_not_fit_are_named(form: str, leaf: str) -> None:
    block, tensors, dequantizer = of_layer(form)
    name = f"up.{leaf}"
    tensor = tensors[name]
    (one,) = dequantizer().float_tensors(block, tensors)
    assert one.make(tensors, torch.bfloat16).shape == one.shape
    for other in (torch.cat([tensor.view(torch.uint8), tensor.view(torch.uint8)]).view(tensor.dtype) if tensor.ndim else tensor.repeat(2),):
        with pytest.raises(CheckpointError, match=rf"'up'.*{leaf}.*damaged"):
            list(dequantizer().float_tensors(block, tensors | {name: other}))
    if leaf in ("weight", "weight_scale"):
        del tensors[name]
        with pytest.raises(CheckpointError, match=rf"lacks '{name}'"):
            list(dequantizer().float_tensors(block, tensors))


@pytest.mark.parametrize(
    ("form", "change", "said"),
    [
        ("nvfp4", {"quant_algo": "W4A8_AWQ"}, "W4A8_AWQ"),
        ("nvfp4", {"quant_algo": None}, "None"),
        ("int8", {"load_in_8bit": False}, "4-bit"),
    ],
    ids=str,
)
def test_other_forms_are_refused_by_name(form: str, change: dict[str, Any], said: str) -> None:
    block, tensors, dequantizer = of_layer(form)
    with pytest.raises(UnsupportedError, match=said):
        list(dequantizer().float_tensors(block | change, tensors))


def test_a_layer_whose_input_has_a_scale_before_it_is_refused() -> None:
    block, tensors, dequantizer = of_layer("nvfp4")
    with pytest.raises(UnsupportedError, match="'up' has a pre_quant_scale"):
        list(dequantizer().float_tensors(block, tensors | {"up.pre_quant_scale": torch.ones(64)}))
