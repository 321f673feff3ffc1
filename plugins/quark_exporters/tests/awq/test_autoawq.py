"""A checkpoint packed by AutoAWQ computes the recorded outputs of its dequantized weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import attrs
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from quark.checkpoint import import_model_from_safetensors
from quark.checkpoint.inspection import inspect_checkpoint
from quark.models.layers import QuantizedLayer
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate

GOLDEN = Path(__file__).parent / "golden"
ULP = 2.0**-10
"""Of float16, relative: AutoAWQ multiplies codes and scales in it."""


def test_the_recordings_are_those_of_the_manifest() -> None:
    manifest = json.loads((GOLDEN / "MANIFEST.json").read_text(encoding="utf-8"))
    assert {name: hashlib.sha256((GOLDEN / name).read_bytes()).hexdigest() for name in manifest["sha256"]} == manifest["sha256"]


def test_logits_are_those_of_the_recording() -> None:
    """In float32 with weights of float16.

    Two blocks with biases, of which an o_proj each is left out by part of its name.
    """
    model = import_model_from_safetensors(None, GOLDEN, device="cpu")
    layers = {name for name, layer in model.named_modules() if isinstance(layer, QuantizedLayer)}
    assert len(layers) == 12
    assert not any("o_proj" in name for name in layers)
    assert close(model.float(), load_file(GOLDEN / "expected.safetensors"))


def test_the_same_values_are_a_source(tmp_path: Path) -> None:
    config = LLMTemplate.get("qwen2").get_config(scheme="int4_wo_32", exclude_layers=["*"])
    quantize_checkpoint(GOLDEN, tmp_path / "out", attrs.evolve(config, keep_prequantized_layers=False))
    of_model = AutoConfig.from_pretrained(tmp_path / "out")
    del of_model.quantization_config
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", config=of_model, dtype=torch.float32)
    assert close(model, load_file(GOLDEN / "expected.safetensors"))


def test_runtimes_load_it() -> None:
    inspection = inspect_checkpoint(GOLDEN)
    assert (inspection.layout, inspection.damage) == ("awq", ())
    assert {runtime.runtime for runtime in inspection.runtimes if runtime.loads} >= {"vllm_cuda", "vllm_cpu"}


def close(model: torch.nn.Module, recorded: dict[str, Tensor]) -> bool:
    with torch.no_grad():
        logits = model(recorded["ids"]).logits.float()
    return float((logits - recorded["logits"]).norm()) <= ULP * float(recorded["logits"].norm())
