"""A checkpoint with fused and renamed tensors is quantized through weight converters as the plain one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import quark
from quark.errors import CheckpointError
from quark.runs import quantize_checkpoint
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.quantization.weight_convert import Chunk, SplitFusedExperts, WeightConverter
from quark_tiny_model import tiny_model_dir

DATA = [torch.arange(3, 40)[None], torch.arange(40, 3, -1)[None]]
LEAVES = ("q_proj", "k_proj", "v_proj")


def fused_checkpoint(directory: Path) -> tuple[Path, list[WeightConverter]]:
    """The bundled checkpoint with one ``qkv.weight`` in each layer, and its converters."""
    shutil.copytree(tiny_model_dir(), directory, dirs_exist_ok=True)
    tensors = load_file(directory / "model.safetensors")
    prefixes = [name.removesuffix("q_proj.weight") for name in tensors if name.endswith("q_proj.weight")]
    sizes = [tensors[f"{prefixes[0]}{leaf}.weight"].shape[0] for leaf in LEAVES]
    for prefix in prefixes:
        tensors[f"{prefix}qkv.weight"] = torch.cat([tensors.pop(f"{prefix}{leaf}.weight") for leaf in LEAVES])
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory, [WeightConverter("qkv.weight", [f"{leaf}.weight" for leaf in LEAVES], operations=[Chunk(0, sizes)])]


def result(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "quark_run.json"}


@pytest.mark.parametrize(
    ("settings", "data"),
    [
        ({"scheme": "int4_wo_64"}, None),
        ({"scheme": "fp8"}, DATA),
        ({"scheme": "int4_wo_64", "algorithm": "gptq"}, DATA),
        ({"scheme": "int4_wo_64", "algorithm": "rotation"}, DATA),
    ],
    ids=["file to file", "static scales", "gptq", "whole model in memory"],
)
def test_a_fused_checkpoint_gives_what_the_plain_one_gives(settings: dict[str, Any], data: Any, tmp_path: Path) -> None:
    source, converters = fused_checkpoint(tmp_path / "fused")
    config = LLMTemplate.get("llama").get_config(**settings)
    quantize_checkpoint(tiny_model_dir(), tmp_path / "plain", config, data)
    quantize_checkpoint(source, tmp_path / "converted", config, data, weight_converters=converters)
    assert result(tmp_path / "converted") == result(tmp_path / "plain")


def test_converters_come_from_the_template_where_none_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, converters = fused_checkpoint(tmp_path / "fused")
    facts = quark.templates().load_architecture("llama")
    template = LLMTemplate(
        "llama", ["*k_proj", "*v_proj"], exclude_layers_name=["lm_head"], f2f_weight_converters=converters, architecture=facts
    )
    config = template.get_config("int4_wo_64")
    with pytest.raises(CheckpointError, match="lacks"):
        quantize_checkpoint(source, tmp_path / "out", config)
    monkeypatch.setattr(LLMTemplate, "get", lambda name: template)
    quantize_checkpoint(source, tmp_path / "out", config)
    quantize_checkpoint(tiny_model_dir(), tmp_path / "plain", config)
    assert result(tmp_path / "out") == result(tmp_path / "plain")


def test_amd_quarks_method_takes_converters_and_leaves_out_those_that_the_model_does_not_need(tmp_path: Path) -> None:
    source, converters = fused_checkpoint(tmp_path / "fused")
    idle = WeightConverter("gate_up_proj", ["gate_proj.weight", "up_proj.weight"], operations=[SplitFusedExperts(split_axis=0)])
    config = LLMTemplate.get("llama").get_config("int4_wo_64")
    quantizer = ModelQuantizer(config)
    quantizer.direct_quantize_checkpoint(str(source), str(tmp_path / "out"), device="cpu", weight_converters=[idle, *converters])
    quantize_checkpoint(tiny_model_dir(), tmp_path / "plain", config)
    assert result(tmp_path / "out") == result(tmp_path / "plain")
