"""FP8 checkpoints by the rules of vLLM's reader, and blocks in transformers' own reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file

from quark.base.version import transformers_version
from quark.checkpoint import import_model_from_safetensors
from quark.checkpoint.export import export_with
from quark.config.layer import QLayerConfig
from quark.config.tensor import QTensorConfig
from quark.errors import UnsupportedError
from quark.torch import LLMTemplate
from quark_devkit.small_models import logits, quantized, run_config

FP8: dict[str, Any] = {"dtype": "fp8_e4m3", "symmetric": True, "scale_type": "float", "round_method": "half_even"}


def blocks(rows: int = 32, columns: int = 64, group: int = 64) -> QLayerConfig:
    weight = QTensorConfig(**FP8, qscheme="per_block", block_size=(rows, columns), is_dynamic=False)
    return QLayerConfig(
        weight=weight, input_tensors=QTensorConfig(**FP8, qscheme="per_group", ch_axis=-1, group_size=group, is_dynamic=True)
    )


def tokens() -> QLayerConfig:
    weight = QTensorConfig(**FP8, qscheme="per_tensor", is_dynamic=False)
    return QLayerConfig(weight=weight, input_tensors=QTensorConfig(**FP8, qscheme="per_channel", ch_axis=1, is_dynamic=True))


def block_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())["quantization_config"]  # type: ignore[no-any-return]


def test_one_scale_with_static_inputs_and_a_cache(tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config(scheme="fp8", kv_cache_scheme="fp8")
    config.separate_kv_scales = True
    model = quantized(config)
    export_with("fp8", model, tmp_path / "out")
    stored, block, name = load_file(tmp_path / "out/model.safetensors"), block_of(tmp_path / "out"), "model.layers.1.self_attn.k_proj"
    own = model.get_submodule(name)
    assert torch.equal(stored[f"{name}.weight"].float() * stored[f"{name}.weight_scale"], own.weight)
    assert stored[f"{name}.input_scale"] == own.input_quantizer.scale
    keys, values = (stored[f"model.layers.1.self_attn.{state}_scale"].item() for state in "kv")
    assert keys != values
    assert (block["activation_scheme"], block["weight_block_size"], block["kv_cache_scheme"]) == ("static", None, "static")
    assert block["ignored_layers"] == block["modules_to_not_convert"] == ["lm_head"]
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "out", device="cpu")), logits(model))


@pytest.mark.parametrize("config", [blocks(), tokens()], ids=["blocks", "tokens"])
def test_dynamic_inputs_come_back(config: QLayerConfig, tmp_path: Path) -> None:
    model = quantized(run_config(config))
    export_with("fp8", model, tmp_path / "out")
    is_blocks = config == blocks()
    block = block_of(tmp_path / "out")
    assert (block["activation_scheme"], block["weight_block_size"]) == ("dynamic", [32, 64] if is_blocks else None)
    assert any(name.endswith("weight_scale_inv") for name in load_file(tmp_path / "out/model.safetensors")) == is_blocks
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "out", device="cpu")), logits(model))


@pytest.mark.parametrize("layout", ["fp8", "compressed_tensors"])
def test_a_configuration_that_is_silent_on_zero_points_has_none(layout: str, tmp_path: Path) -> None:
    silent = QTensorConfig(dtype="fp8_e4m3", qscheme="per_tensor", observer_cls="PerTensorMinMaxObserver", is_dynamic=False)
    stored = {}
    for name, spec in {"silent": silent, "explicit": silent.set(symmetric=True)}.items():
        model = quantized(run_config(QLayerConfig(weight=spec, input_tensors=spec)))
        export_with(layout, model, tmp_path / name)
        stored[name] = load_file(tmp_path / name / "model.safetensors"), block_of(tmp_path / name)
    assert stored["silent"][1] == stored["explicit"][1]
    assert all(torch.equal(tensor, stored["explicit"][0][name]) for name, tensor in stored["silent"][0].items())


@pytest.mark.filterwarnings("ignore")
def test_transformers_dequantizes_blocks_to_our_values(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    pytest.importorskip("accelerate", reason="transformers wants it to load FP8")
    if Version(transformers_version() or "0") < Version("5.5"):
        pytest.skip(f"transformers {transformers_version()} gives other values")
    model = quantized(run_config(blocks()), torch.bfloat16)
    export_with("fp8", model, tmp_path / "out")
    expected, loaded = model.state_dict(), AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items() if name in loaded and name.endswith("weight"))


def test_readers_that_take_codes_for_values_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    export_with("fp8", quantized(run_config(tokens())), tmp_path / "out")
    assert "For transformers, export as compressed_tensors" in caplog.text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("ptpc_fp8", "not per_channel.*Layouts that hold this model: compressed_tensors, .*safetensors"),
        ("mxfp4_weight_only", "the weight or the input is float"),
        ("int8", "not int8 → int8"),
        (blocks(group=32), "dynamic in groups of 64, as many as a block has columns"),
    ],
)
def test_what_the_layout_cannot_hold_is_refused(config: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=message):
        export_with("fp8", quantized(run_config(config)), tmp_path / "out")
    assert not (tmp_path / "out").exists()
