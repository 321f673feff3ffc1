"""AWQ checkpoints by the rules of their readers, in numpy.

Order of half bytes, zero points of symmetric weights, names, configuration.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quark.checkpoint import import_model_from_safetensors
from quark.checkpoint.export import export_with
from quark.checkpoint.exporter import ExportOptions
from quark.config.layer import QLayerConfig
from quark.errors import ConfigError, UnsupportedError
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate
from quark_devkit.small_models import logits, quantized, run_config, saved
from quark_exporters.awq import AwqDequantizer

HALF = 2.0**-11
"""Relative error of a number in float16."""
REVERSE = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where vLLM finds output channel 0, 1, … of eight (``_REVERSE_AWQ_PACK_ORDER``)."""


def unpacked(words: Tensor) -> np.ndarray:
    """The codes of words by vLLM's ``_convert_awq_to_standard_format``, in numpy."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    nibbles = (words.numpy().view(np.uint32)[:, :, None] >> shifts) & 0xF
    return nibbles[:, :, REVERSE].reshape(len(words), -1).astype(np.float32)


def weights(directory: Path, group: int) -> dict[str, np.ndarray]:
    """The weight of each layer with codes, ``[O, I]``, as AutoAWQ's kernel computes it."""
    stored = load_file(directory / "model.safetensors")
    result = {}
    for name in (n.removesuffix(".qweight") for n in stored if n.endswith(".qweight")):
        codes, zeros, scales = unpacked(stored[f"{name}.qweight"]), unpacked(stored[f"{name}.qzeros"]), stored[f"{name}.scales"]
        size = len(codes) if group == -1 else group
        spread = [np.repeat(t, size, axis=0) for t in (zeros, scales.float().numpy())]
        result[f"{name}.weight"] = ((codes - spread[0]) * spread[1]).T
    return result


@pytest.mark.parametrize(("scheme", "group"), [("int4_wo_32", 32), ("uint4_wo_64", 64), ("int4_wo_per_channel", -1)])
def test_readers_of_awq_find_our_codes_and_scales(scheme: str, group: int, tmp_path: Path) -> None:
    model = quantized(run_config(scheme))
    export_with("awq", model, tmp_path / "exact", ExportOptions(own={"scale_type": "float32"}))
    export_with("awq", model, tmp_path / "out")
    exact, rounded, expected = weights(tmp_path / "exact", group), weights(tmp_path / "out", group), model.state_dict()
    assert len(exact) == 14
    for name, values in exact.items():
        assert np.array_equal(values, expected[name].numpy())
        np.testing.assert_allclose(rounded[name], values, rtol=HALF, atol=0)
    block = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert block == {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "modules_to_not_convert": ["lm_head"],
    }
    stored = load_file(tmp_path / "out/model.safetensors")
    assert stored["model.layers.0.mlp.up_proj.scales"].dtype is torch.float16
    assert not any(name.endswith("up_proj.weight") for name in stored)
    if scheme.startswith("int4"):
        assert all(np.all(unpacked(tensor) == 8) for name, tensor in stored.items() if name.endswith(".qzeros"))


def test_with_scales_as_they_were_found_the_same_model_comes_back(tmp_path: Path) -> None:
    model = quantized(run_config("uint4_wo_32"))
    export_with("awq", model, tmp_path / "out", ExportOptions(own={"scale_type": "float32"}))
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path / "out", device="cpu")), logits(model))


def test_transformers_takes_the_configuration(tmp_path: Path) -> None:
    from transformers import AwqConfig

    export_with("awq", quantized(run_config("uint4_wo_32")), tmp_path / "out")
    config = AwqConfig.from_dict(json.loads((tmp_path / "out/config.json").read_text())["quantization_config"])
    assert (config.bits, config.group_size, config.zero_point, str(config.format)) == (4, 32, True, "gemm")
    assert config.modules_to_not_convert == ["lm_head"]


def test_a_checkpoint_of_awq_can_be_quantized_anew(tmp_path: Path) -> None:
    first, second = (LLMTemplate.get("llama").get_config(scheme=scheme) for scheme in ("int4_wo_64", "ptpc_fp8"))
    quantize_checkpoint(saved(tmp_path / "float"), tmp_path / "first", first, exporter="awq")
    quantize_checkpoint(tmp_path / "first", tmp_path / "second", second)
    assert "weight_scale" in " ".join(load_file(tmp_path / "second/model.safetensors"))


def mixed() -> Any:
    config = run_config("int4_wo_32")
    config.layer_quant_config = {"*down_proj": run_config("int4_wo_64").global_quant_config}
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: run_config("int8"), r"its input is quantized, but AWQ quantizes only weights \(.*Layouts that hold .*compressed_tensors"),
        (lambda: run_config("mxfp4_weight_only"), "not fp4"),
        (mixed, "have 32, 64"),
        (lambda: run_config(QLayerConfig()), "nothing is quantized"),
    ],
)
def test_what_awq_cannot_hold_is_refused(config: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=message):
        export_with("awq", quantized(config()), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_unknown_dtype_of_scales_is_refused() -> None:
    with pytest.raises(ConfigError, match="one of float16"):
        export_with("awq", quantized(run_config("int4_wo_32")), Path("nowhere"), ExportOptions(own={"scale_type": "f4"}))


def test_tensors_that_do_not_fit_each_other_are_refused() -> None:
    stored = {"a.qweight": torch.zeros(64, 4, dtype=torch.int32), "a.qzeros": torch.zeros(1, 4, dtype=torch.int32)}
    block = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    with pytest.raises(Exception, match=r"lacks 'a\.scales'"):
        list(AwqDequantizer().float_tensors(block, stored))
    with pytest.raises(Exception, match="do not match for groups of 32"):
        list(AwqDequantizer().float_tensors(block, stored | {"a.scales": torch.zeros(1, 32)}))
    with pytest.raises(UnsupportedError, match="bits=8"):
        list(AwqDequantizer().float_tensors(block | {"bits": 8}, stored))
