"""Runs that only store weights do not round them.

They make the codes directly from the float values, and the codes are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import quark
import quark_tiny_model as tiny
from quark.algorithms import RoundingTask, RoundToNearest
from quark.checkpoint import exported_layer
from quark.checkpoint.export import export_with
from quark.checkpoint.exporter import ExportOptions
from quark.errors import ConfigError
from quark.models.hf.loading import load_model
from quark.models.layers import QuantizedLayer, quantized_class
from quark.models.layers.coded_layer import stored_tensors
from quark.runs import ModelQuantizer, quantize_checkpoint
from quark.torch import LLMTemplate


def quantized(scheme: str, *, defers: bool, dtype: torch.dtype = torch.bfloat16) -> QuantizedLayer:
    torch.manual_seed(0)
    float_layer = nn.Linear(256, 96, bias=False, dtype=dtype)
    layer = quantized_class(float_layer).from_float(float_layer, quark.schemes().load_config(scheme)())
    RoundToNearest(defers=defers).round(RoundingTask({"layer": layer}))
    return layer


@pytest.mark.parametrize("scheme", ["fp8", "int8", "int4_wo_64", "uint4_wo_64", "mxfp4_weight_only", "mx6", "nvfp4", "int4_fp8"])
def test_what_is_stored_of_a_float_weight_is_what_is_stored_of_the_rounded_one(scheme: str) -> None:
    deferred, rounded = quantized(scheme, defers=True), quantized(scheme, defers=False)
    assert deferred.weight_quantizer.is_deferred
    assert not torch.equal(deferred.weight, rounded.weight)
    stored = [stored_tensors("layer", layer.weight_quantizer, layer.weight, "reorder") for layer in (deferred, rounded)]
    assert stored[0].keys() == stored[1].keys()
    assert all(torch.equal(t.reshape(-1).view(torch.uint8), stored[1][n].reshape(-1).view(torch.uint8)) for n, t in stored[0].items())


def test_a_weight_whose_codes_might_change_is_rounded() -> None:
    layer = quantized("mxfp4_weight_only", defers=False)
    with torch.no_grad():
        layer.weight[3, :32] = 0  # a block whose scale is the smallest normal number
    RoundToNearest(defers=True).round(RoundingTask({"layer": layer}))
    assert not layer.weight_quantizer.is_deferred


def test_codes_that_are_not_those_of_the_float_weight_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = quantized("int4_wo_64", defers=True)
    module = layer.weight_quantizer
    with torch.no_grad():
        other = layer.weight + 1
    monkeypatch.setattr(type(module), "codes_of", lambda self, weight: self.quantizer.quantize(other, self.qparams))
    with pytest.raises(ConfigError, match="values that no code represents"):
        stored_tensors("layer", module, layer.weight, "reorder")


def config(*, head: bool = False) -> Any:
    made = LLMTemplate.get("llama").get_config(scheme="int4_wo_64")
    if head:
        made.exclude = []
    return made


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Yield whether each weight was still float when it was stored."""
    seen: list[bool] = []

    def store(name: str, module: Any, values: Any, order: str) -> Any:
        seen.append(module.is_deferred)
        return stored_tensors(name, module, values, order)

    monkeypatch.setattr(exported_layer, "stored_tensors", store)
    yield seen


def test_a_run_from_disk_stores_codes_of_float_weights_and_one_in_memory_rounds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recorded(monkeypatch) as seen:
        quantize_checkpoint(tiny.tiny_model_dir(), tmp_path / "disk", config(head=True))
        assert seen
        assert all(seen)
        seen.clear()
        model = ModelQuantizer(config(head=True)).quantize_model(load_model(tiny.tiny_model_dir()))
        export_with("safetensors", model, tmp_path / "memory")
        assert seen
        assert not any(seen)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "disk" / name).read_bytes() == (tmp_path / "memory" / name).read_bytes()


def test_an_export_of_rounded_values_gets_them(tmp_path: Path) -> None:
    options = ExportOptions(weight_format="fake_quantized")
    quantize_checkpoint(tiny.tiny_model_dir(), tmp_path / "disk", config(), options=options)
    model = ModelQuantizer(config()).quantize_model(load_model(tiny.tiny_model_dir()))
    stored = load_file(tmp_path / "disk" / "model.safetensors")
    names = [n for n, m in model.named_modules() if isinstance(m, QuantizedLayer)]
    assert names
    assert all(torch.equal(stored[f"{n}.weight"], model.get_submodule(n).weight) for n in names)
