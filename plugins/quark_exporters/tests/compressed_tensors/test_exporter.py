"""The package compressed-tensors, and transformers with it, read the model in memory from our checkpoints."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file
from torch import Tensor

import quark
from quark.base.version import transformers_version
from quark.checkpoint import import_model_from_safetensors
from quark.checkpoint.export import export_with
from quark.checkpoint.exporter import ExportOptions
from quark.config.layer import QLayerConfig
from quark.config.tensor import QTensorConfig
from quark.errors import UnsupportedError
from quark.torch import LLMTemplate
from quark_devkit.small_models import logits, quantized, run_config

compressors = pytest.importorskip("compressed_tensors.compressors.base", reason="compressed-tensors is not installed")
quantization = pytest.importorskip("compressed_tensors.quantization")

EXACT = ("int4_wo_32", "uint4_wo_64", "int4_wo_per_channel", "uint4_wo_per_channel", "int4_wa_64", "int8", "fp8", "ptpc_fp8", "mxfp4")
ULP = 2.0**-23


def blocks_of_64() -> QLayerConfig:
    """FP8 in blocks of 64 x 64, inputs in groups of 64."""
    common: dict[str, Any] = {"dtype": "fp8_e4m3", "symmetric": True, "scale_type": "float", "round_method": "half_even"}
    weight = QTensorConfig(**common, qscheme="per_block", block_size=(64, 64), is_dynamic=False)  # type: ignore[arg-type]
    inputs = QTensorConfig(**common, qscheme="per_group", ch_axis=-1, group_size=64, is_dynamic=True)  # type: ignore[arg-type]
    return QLayerConfig(weight=weight, input_tensors=inputs)


def wide() -> QLayerConfig:
    """FP8 in blocks of 32 rows, which the smallest matrices of the small model have."""
    config = blocks_of_64()
    assert isinstance(config.weight, QTensorConfig)
    return attrs.evolve(config, weight=attrs.evolve(config.weight, block_size=(32, 64)))


def decompressed(directory: Path) -> dict[str, Tensor]:
    """The weight of each layer with codes, as the package decompresses it."""
    config = quantization.QuantizationConfig.model_validate(json.loads((directory / "config.json").read_text())["quantization_config"])
    stored: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        stored.setdefault(name.rpartition(".")[0], {})[name.rpartition(".")[2]] = tensor
    (scheme,) = config.config_groups.values()
    assert config.format == scheme.format
    compressor = compressors.BaseCompressor.get_value_from_registry(scheme.format)
    layers = {name: own for name, own in stored.items() if "weight_scale" in own}
    return {f"{name}.weight": compressor.decompress(own, scheme)["weight"] for name, own in layers.items()}


@pytest.mark.parametrize("scheme", [*EXACT, "blocks"])
def test_the_package_decompresses_our_values_to_the_bit(scheme: str, tmp_path: Path) -> None:
    if scheme in ("mxfp4", "blocks") and Version(version("compressed-tensors")) < Version("0.16"):
        pytest.skip(f"compressed-tensors {version('compressed-tensors')} decompresses no {scheme}")
    model = quantized(run_config(wide() if scheme == "blocks" else scheme))
    export_with("compressed_tensors", model, tmp_path / "out")
    weights, expected = decompressed(tmp_path / "out"), model.state_dict()
    assert len(weights) == 14
    assert all(torch.equal(tensor.float(), expected[name]) for name, tensor in weights.items())


def test_nvfp4_differs_by_the_rounding_of_a_reciprocal(tmp_path: Path) -> None:
    """The package divides by the scale of the tensor, where we multiply.

    It rounds scale and product to bfloat16.
    """
    model = quantized(run_config("nvfp4"))
    export_with("compressed_tensors", model, tmp_path / "out")
    weights, expected = decompressed(tmp_path / "out"), model.state_dict()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor.float(), expected[name], rtol=2 * 2.0**-9 + 4 * ULP, atol=0)
    stored = load_file(tmp_path / "out/model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    own = model.get_submodule(name)
    assert stored[f"{name}.weight_global_scale"].item() == pytest.approx(1 / own.weight_quantizer.qparams.outer_scale.item(), rel=ULP)
    assert stored[f"{name}.input_global_scale"].item() == pytest.approx(1 / own.input_quantizer.qparams.scale.item(), rel=ULP)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("scheme", "cache"), [("int4_wo_32", "fp8"), ("fp8", None), ("ptpc_fp8", None)])
def test_transformers_computes_our_logits_to_the_bit(scheme: str, cache: str | None, tmp_path: Path) -> None:
    """Codes, quantized inputs and the cache, all by code that is not ours.

    (For int8 inputs it divides by scales, and we multiply.)
    """
    from transformers import AutoModelForCausalLM

    config = LLMTemplate.get("llama").get_config(scheme=scheme, kv_cache_scheme=cache)
    model = quantized(config)
    export_with("compressed_tensors", model, tmp_path / "out")
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "out", device="cpu")), logits(model))
    theirs = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    if cache is not None and Version(transformers_version() or "0") >= Version("5.24"):
        without = quantized(LLMTemplate.get("llama").get_config(scheme=scheme))
        assert torch.equal(theirs, logits(without)), "it leaves the cache as it is"
        return
    assert torch.equal(theirs, logits(model))


@pytest.mark.filterwarnings("ignore")
def test_a_scheme_for_each_layer_has_a_group_each(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = run_config("int4_wo_32", exclude=("*o_proj",))
    config.layer_quant_config = {"*down_proj": quark.schemes().load_config("ptpc_fp8")()}
    model = quantized(config)
    export_with("compressed_tensors", model, tmp_path / "out")
    block = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    targets = {group["format"]: group["targets"] for group in block["config_groups"].values()}
    assert targets == {"pack-quantized": ["Linear"], "float-quantized": [f"model.layers.{i}.mlp.down_proj" for i in range(2)]}
    assert block["format"] == "mixed-precision"
    assert set(block["ignore"]) == {"lm_head", *(f"model.layers.{i}.self_attn.o_proj" for i in range(2))}
    for loaded in (AutoModelForCausalLM.from_pretrained(tmp_path / "out"), import_model_from_safetensors(None, tmp_path / "out")):
        assert torch.equal(logits(loaded), logits(model))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mxfp4_fp8", {}, r"with weights in MXFP4, inputs must be in MXFP4.*Layouts that hold this model: .*safetensors"),
    ("amdfp4", {}, r"scales in e5m3.*model\.layers\.\{0-1\}\.self_attn\.q_proj"),
    ("int4_fp8", {}, "no format for fp8_e4m3 → int4"),
    ("int4_wo_32", {"weight_format": "fake_quantized"}, "asks for rounded values"),
]


@pytest.mark.parametrize(("scheme", "options", "message"), REFUSED)
def test_what_the_layout_cannot_hold_is_refused_with_those_that_can(
    scheme: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=f"layout 'compressed_tensors' cannot hold.*{message}"):
        export_with("compressed_tensors", quantized(run_config(scheme)), tmp_path / "out", ExportOptions(**options))
    assert not (tmp_path / "out").exists()


def test_a_cache_that_is_rounded_before_the_rotary_embedding_is_refused(tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_32", kv_cache_scheme="fp8", kv_cache_post_rope=False)
    with pytest.raises(UnsupportedError, match="Set kv_cache_post_rope=True"):
        export_with("compressed_tensors", quantized(config), tmp_path / "out")
