"""Exports of rounded values (``weight_format="fake_quantized"``) are read back to the model of codes."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

import quark
from quark.torch import LLMTemplate, ModelExporter, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.export import ExporterConfig, JsonExporterConfig
from quark_tiny_model import calibration_batches, tiny_model

IDS = torch.arange(40).reshape(2, 20)


def quantized(scheme: str, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    config = LLMTemplate.get("llama").get_config(scheme=scheme, **options)
    return ModelQuantizer(config).quantize_model(tiny_model(dtype, blocks=1), calibration_batches(2, 32))


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def same_bytes(first: Path, second: Path) -> bool:
    return all((first / name).read_bytes() == (second / name).read_bytes() for name in ("model.safetensors", "config.json"))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("scheme", quark.schemes().names())
def test_rounded_values_of_every_scheme_reload_to_the_same_model(scheme: str, tmp_path: Path) -> None:
    """In our reader and in transformers.

    And what was read is exported as codes to the same bytes as the model itself.
    """
    model = quantized(scheme, torch.bfloat16, kv_cache_scheme="fp8")
    export_safetensors(model, tmp_path / "values", weight_format="fake_quantized")
    export_safetensors(model, tmp_path / "codes")
    back = import_model_from_safetensors(tiny_model(torch.bfloat16, blocks=1), tmp_path / "values")
    assert torch.equal(logits(back), logits(model))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "values", dtype="auto")), logits(model))
    export_safetensors(back, tmp_path / "codes again")
    assert same_bytes(tmp_path / "codes", tmp_path / "codes again")


def test_the_export_holds_values_in_the_models_dtype_the_scales_and_the_configuration(tmp_path: Path) -> None:
    model = quantized("fp8", torch.bfloat16)
    export_safetensors(model, tmp_path / "out", weight_format="fake_quantized")
    tensors, config = load_file(tmp_path / "out" / "model.safetensors"), json.loads((tmp_path / "out" / "config.json").read_text())
    name = "model.layers.0.mlp.up_proj"
    assert torch.equal(tensors[f"{name}.weight"], model.get_submodule(name).weight)  # type: ignore[arg-type]
    assert {f"{name}.weight_scale", f"{name}.input_scale"} <= set(tensors)
    assert config["quantization_config"]["export"]["weight_format"] == "fake_quantized"


def test_a_tied_head_and_attention_reload_as_well(tmp_path: Path) -> None:
    model = quantized("int8", exclude_layers=[], kv_cache_scheme="fp8", attention_scheme="fp8", kv_cache_post_rope=True)
    export_safetensors(model, tmp_path / "out", weight_format="fake_quantized")
    assert torch.equal(logits(import_model_from_safetensors(tiny_model(blocks=1), tmp_path / "out")), logits(model))
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "out")), logits(model))


@pytest.mark.parametrize("weight_format", ["real_quantized", "fake_quantized"])
def test_only_rounded_values_are_warned_of(weight_format: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = ExporterConfig(json_export_config=JsonExporterConfig(weight_format=weight_format))
    ModelExporter(config, tmp_path / "out").export_safetensors_model(quantized("int4_wo_64"))
    warned = [r for r in caplog.records if r.levelno == logging.WARNING and "would interpret them as codes" in r.getMessage()]
    assert len(warned) == (weight_format == "fake_quantized")


def test_merge_groups_of_weights_that_are_rounded_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = ExporterConfig(json_export_config=JsonExporterConfig(weight_merge_groups=[["*q_proj", "*k_proj", "*v_proj"]]))
    ModelExporter(config, tmp_path / "out").export_safetensors_model(quantized("int4_wo_64"))
    assert "Set shared_scale_groups in the QConfig" in caplog.text
