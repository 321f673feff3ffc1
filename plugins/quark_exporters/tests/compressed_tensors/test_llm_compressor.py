"""Checkpoints that llm-compressor has written compute here what transformers and compressed-tensors computed when they were recorded."""

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
from quark.modules import QuantizedLayer

GOLDEN = Path(__file__).parent / "golden_checkpoints"
MANIFEST = json.loads((GOLDEN / "MANIFEST.json").read_text(encoding="utf-8"))
SCHEMES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
ON_EDGES = ("W8A8", "NVFP4")
"""Schemes in which the largest element of a token, or the scale of a block, lies halfway between two codes. The package divides by scales,
we multiply by their inverse, as AMD Quark does, and the last bit decides: inputs are rounded by the package here."""


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


@pytest.mark.parametrize("scheme", SCHEMES)
def test_logits_are_those_of_the_recording(scheme: str) -> None:
    model = import_model_from_safetensors(float_model(GOLDEN / scheme), GOLDEN / scheme, device="cpu")
    layers = [layer for layer in model.modules() if isinstance(layer, QuantizedLayer)]
    assert len(layers) == 7
    if scheme in ON_EDGES:
        with_inputs_rounded_by_the_package(model, GOLDEN / scheme)
    recorded = load_file(GOLDEN / scheme / "expected.safetensors")
    with torch.no_grad():
        assert torch.equal(model(recorded["ids"]).logits.float(), recorded["logits"])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_is_whole_and_runtimes_have_methods_for_it(scheme: str) -> None:
    inspection = inspect_checkpoint(GOLDEN / scheme)
    assert (inspection.layout, inspection.damage) == ("compressed_tensors", ())
    assert all(runtime.methods for runtime in inspection.runtimes if runtime.runtime == "vllm_cuda")
