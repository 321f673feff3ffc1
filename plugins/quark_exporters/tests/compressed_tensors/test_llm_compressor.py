"""Checkpoints written by llm-compressor compute the recorded outputs.

transformers and compressed-tensors computed the recordings.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from quark.checkpoint import import_model_from_safetensors
from quark.checkpoint.inspection import inspect_checkpoint
from quark.models.layers import QuantizedLayer

GOLDEN = Path(__file__).parent / "golden_checkpoints"
MANIFEST = json.loads((GOLDEN / "MANIFEST.json").read_text(encoding="utf-8"))
SCHEMES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
ON_EDGES = ("W8A8", "NVFP4")
"""Schemes in which the largest element of a token, or the scale of a block, is halfway between two codes.

The package divides by scales, we multiply by their inverse, as AMD Quark does, and the last bit decides:
inputs are rounded by the package here.
"""
STEPS = {"W8A8": 2.0**-5, "FP8": 2.0**-3, "FP8_BLOCK": 2.0**-3, "FP8_DYNAMIC": 2.0**-3, "MXFP4": 2.0**-1, "NVFP4": 2.0**-1}
"""Of schemes that round inputs, how far an input may change, relative to it.

This is where the last bit of a product puts it on the other side of a
tie: a step of e4m3 and e2m1 at a power of two, and a 127th of the largest where an input is a quarter of
    that.
"""


def tolerance(scheme: str) -> float:
    """The relative error in norm of logits that another CPU computes.

    Sums of 128 terms are in another order, and of the inputs that are
    rounded one in 64 falls on the other side of a tie, for many are bfloat16 numbers divided by such a
    number.
    """
    rounded_once = torch.finfo(torch.bfloat16).eps
    products = rounded_once if "FP4" in scheme else 128 * torch.finfo(torch.float32).eps
    return products + STEPS.get(scheme, 0) / 64**0.5


class RoundedByThePackage(nn.Module):
    """Rounds inputs as compressed-tensors does, with scales that it finds."""

    def __init__(self, package: Any, arguments: Any, global_scale: Tensor | None) -> None:
        super().__init__()
        self._package, self._arguments, self._global_scale = package, arguments, global_scale

    def forward(self, x: Tensor) -> Tensor:
        own = {"args": self._arguments, "global_scale": self._global_scale}
        scale, zero_point = self._package.utils.compute_dynamic_scales_and_zp(x, module=None, **own)
        rounded: Tensor = self._package.lifecycle.forward.fake_quantize(x, scale, zero_point, **own)
        return rounded


def with_inputs_rounded_by_the_package(model: nn.Module, directory: Path) -> nn.Module:
    package = pytest.importorskip("compressed_tensors.quantization", reason="compressed-tensors is not installed")
    block = json.loads((directory / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    (group,) = package.QuantizationConfig.model_validate(block).config_groups.values()
    stored = load_file(directory / "model.safetensors")
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLayer):
            over_all = stored.get(f"{name}.input_global_scale")
            layer.input_quantizer = RoundedByThePackage(package, group.input_activations, over_all)  # type: ignore[assignment]
    return model


def float_model(directory: Path) -> Any:
    config = AutoConfig.from_pretrained(directory)
    del config.quantization_config
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if "FP4" in directory.name else torch.float32)


def test_the_recordings_are_those_of_the_manifest() -> None:
    assert MANIFEST["refused"] == {}
    assert {name: hashlib.sha256((GOLDEN / name).read_bytes()).hexdigest() for name in MANIFEST["sha256"]} == MANIFEST["sha256"]
    assert {name.partition("/")[0] for name in MANIFEST["sha256"]} == {*SCHEMES}


def loaded(scheme: str) -> nn.Module:
    model: nn.Module = import_model_from_safetensors(float_model(GOLDEN / scheme), GOLDEN / scheme, device="cpu")
    assert len(quantized_layers(model)) == 7
    return with_inputs_rounded_by_the_package(model, GOLDEN / scheme) if scheme in ON_EDGES else model


def quantized_layers(model: nn.Module) -> list[QuantizedLayer]:
    return [layer for layer in model.modules() if isinstance(layer, QuantizedLayer)]


def error_of_logits(model: nn.Module, scheme: str) -> float:
    recorded = load_file(GOLDEN / scheme / "expected.safetensors")
    with torch.no_grad():
        return float((model(recorded["ids"]).logits.float() - recorded["logits"]).norm() / recorded["logits"].norm())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_logits_are_those_of_the_recording(scheme: str) -> None:
    assert error_of_logits(loaded(scheme), scheme) <= tolerance(scheme)


@pytest.mark.parametrize("scheme", STEPS)
def test_logits_without_rounded_inputs_are_not(scheme: str) -> None:
    model = loaded(scheme)
    for layer in quantized_layers(model):
        layer.input_quantizer = None
    assert error_of_logits(model, scheme) > tolerance(scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_logits_with_the_scales_of_one_layer_doubled_are_not(scheme: str) -> None:
    model = loaded(scheme)
    quantized_layers(model)[-1].weight.data *= 2
    assert error_of_logits(model, scheme) > tolerance(scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_is_whole_and_runtimes_have_methods_for_it(scheme: str) -> None:
    inspection = inspect_checkpoint(GOLDEN / scheme)
    assert (inspection.layout, inspection.damage) == ("compressed_tensors", ())
    assert all(runtime.methods for runtime in inspection.runtimes if runtime.runtime == "vllm_cuda")
