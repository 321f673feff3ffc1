"""Checkpoints as DeepSeek-V3 is published: FP8 in blocks of 128 x 128, ragged last blocks, separate experts.

One layer, which predicts further tokens, is in the files and not in the model.

The values are computed here in float64 by the rule of the model's card:
``weight[i, j] * weight_scale_inv[i // 128, j // 128]``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quark.checkpoint import import_model_from_safetensors
from quark.checkpoint.inspection import inspect_checkpoint
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate

from ..kept_layer_forms import DEEPSEEK, DTYPE, contents, deepseek, fp8

PREDICTING = "model.layers.61.eh_proj.weight"


def values_of(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the values of codes in blocks, in bfloat16."""
    rows, columns = codes.shape
    spread = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return (codes.double() * spread.double()).to(torch.float32).to(DTYPE)


@pytest.fixture(params=[64, 128], ids=["ragged", "whole blocks"])
def checkpoints(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """The checkpoint with codes, and the one with their values in bfloat16."""
    model = deepseek(request.param)
    model.config.num_nextn_predict_layers = 1
    model.save_pretrained(tmp_path / "float")
    values = load_file(tmp_path / "float/model.safetensors")
    values[PREDICTING] = torch.randn(128, 256).to(DTYPE)  # transformers leaves this layer out
    codes: dict[str, Tensor] = {}
    for name, tensor in values.items():
        codes |= fp8(name, tensor)
        if f"{name}_scale_inv" in codes:
            values[name] = values_of(codes[name], codes[f"{name}_scale_inv"])
    text = json.loads((tmp_path / "float/config.json").read_text())
    for kind, tensors, more in (("codes", codes, {"quantization_config": DEEPSEEK}), ("values", values, {})):
        (tmp_path / kind).mkdir()
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / kind / "model.safetensors", {"format": "pt"})
        (tmp_path / kind / "config.json").write_text(json.dumps(text | more))
    return tmp_path / "codes", tmp_path / "values"


def test_as_a_source_it_is_what_its_values_are(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    config = LLMTemplate.get("deepseek_v3").get_config(scheme="int4_wo_32")
    config.keep_prequantized_layers = False
    for source in checkpoints:
        quantize_checkpoint(source, tmp_path / f"{source.name}_out", config)
    codes, values = (contents(tmp_path / f"{source.name}_out") for source in checkpoints)
    assert codes == values


def test_as_a_quantized_model_it_has_its_values(checkpoints: tuple[Path, Path]) -> None:
    codes, values = checkpoints
    expected = load_file(values / "model.safetensors")
    model = import_model_from_safetensors(None, codes, device="cpu").state_dict()
    assert len([name for name in expected if ".experts.3." in name]) == 3
    for name, tensor in expected.items():
        if "layers.61." not in name:
            assert torch.equal(model[name], tensor), name


def test_gpus_have_kernels_for_it(checkpoints: tuple[Path, Path], request: pytest.FixtureRequest) -> None:
    if "ragged" not in request.node.name:
        cuda = next(one for one in inspect_checkpoint(checkpoints[0]).runtimes if one.runtime == "vllm_cuda")
        assert any(method.startswith("Fp8LinearMethod") for method in cuda.methods)
