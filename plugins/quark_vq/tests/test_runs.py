"""Whole runs: codebooks beat integers, reload to the bit, and what cannot take them refuses by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from quark.checkpoint import import_model_from_safetensors
from quark.config.layer import QLayerConfig
from quark.config.tensor import QTensorConfig
from quark.errors import NonFiniteError, UnsupportedError
from quark.plugins import exporters
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark_tiny_model import calibration_batches, tiny_model, tiny_model_dir

TOKENS = torch.arange(64)[None]


def config(scheme: str, algorithm: str | None, **fields: Any) -> Any:
    built = LLMTemplate.get("llama").get_config(scheme, algorithm=[algorithm] if algorithm else None)
    for settings in built.algo_config or []:
        for name, value in fields.items():
            setattr(settings, name, value)
    return built


def quantized(of: Any) -> torch.nn.Module:
    return ModelQuantizer(of).quantize_model(tiny_model(), calibration_batches(4, 64))


@torch.no_grad()
def divergence(model: torch.nn.Module) -> float:
    expected = tiny_model()(TOKENS).logits.log_softmax(-1)
    found = model(TOKENS).logits.log_softmax(-1)
    return float((expected.exp() * (expected - found)).sum(-1).mean())


@pytest.mark.parametrize("algorithm", [None, pytest.param("gptq", marks=pytest.mark.thorough)])
def test_two_bits_beat_integers_of_as_many(algorithm: str | None) -> None:
    spec = QTensorConfig(
        dtype="uint2", qscheme="per_group", ch_axis=-1, group_size=64, symmetric=False, is_dynamic=False, scale_type="bfloat16"
    )
    integers = config("vq2", algorithm)
    integers.global_quant_config = QLayerConfig(weight=spec)
    assert divergence(quantized(config("vq2", algorithm))) < 0.75 * divergence(quantized(integers))


LAYER = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("algorithm", [None, "gptq"])
def test_a_weight_with_nan_is_named_before_anything_is_changed_or_written(algorithm: str | None, tmp_path: Path) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.get_submodule(LAYER).weight[3, 5] = torch.nan
    model.save_pretrained(tmp_path / "float")
    data = calibration_batches(4, 64) if algorithm else None
    with pytest.raises(NonFiniteError, match=rf"{LAYER}\.weight.*Nothing has been changed.*damaged"):
        ModelQuantizer(config("vq2", algorithm)).quantize_model(model, data)
    with pytest.raises(NonFiniteError, match=rf"{LAYER}\.weight.*damaged"):
        quantize_checkpoint(tmp_path / "float", tmp_path / "out", config("vq2", algorithm), data)
    assert not (tmp_path / "out").exists()


@torch.no_grad()
@pytest.mark.parametrize(
    ("scheme", "algorithm"), [pytest.param("vq2", "gptq", marks=pytest.mark.thorough), ("vq3_g64", None), ("vq3", "qronos")]
)
def test_a_model_reloads_to_the_bit(scheme: str, algorithm: str | None, tmp_path: Path) -> None:
    model = quantized(config(scheme, algorithm))
    expected = model(TOKENS).logits
    export_safetensors(model, tmp_path / "out")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "out")(TOKENS).logits, expected)
    for packed in (False, True):
        again = import_model_from_safetensors(tiny_model(), tmp_path / "out", packed=packed)
        assert torch.equal(again(TOKENS).logits, expected)


@pytest.mark.parametrize(("algorithm", "fields"), [("autoround", {}), ("tuning", {}), ("gptaq", {"preset": "reference"})])
def test_what_chooses_single_elements_is_refused(algorithm: str, fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=rf"'{algorithm}' chooses the elements of a weight one by one, but 'vq2', the format of"):
        quantized(config("vq2", algorithm, **fields))


@pytest.mark.parametrize("layout", ["awq", "compressed_tensors", "fp8", "gguf", "onnx"])
def test_layouts_without_codebooks_refuse_before_any_work(layout: str, tmp_path: Path) -> None:
    assert layout in exporters()
    with pytest.raises(UnsupportedError, match=r"vq2|float"):
        quantize_checkpoint(tiny_model_dir(), tmp_path / "out", config("vq2", None), exporter=layout)
    assert not (tmp_path / "out").exists()
