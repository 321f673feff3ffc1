"""Exports that were damaged after they were written are refused by our reader."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from quark.errors import CheckpointError
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark_tiny_model import tiny_model, tiny_model_dir


def quantized(scheme: str) -> nn.Module:
    return ModelQuantizer(LLMTemplate.get("llama").get_config(scheme=scheme)).quantize_model(tiny_model())


def broken(directory: Path, change: Any) -> Path:
    export_safetensors(quantized("int4_wo_64"), directory)
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


BROKEN: dict[str, tuple[Any, str]] = {
    "a missing tensor": (lambda t: t.pop("model.layers.1.mlp.up_proj.weight_scale"), "lacks 1 tensor"),
    "a tensor too many": (lambda t: t.update(stranger=torch.zeros(1)), "no place"),
    "another shape": (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"shape \[3\]"),
}


@pytest.mark.parametrize(("change", "words"), BROKEN.values(), ids=BROKEN)
def test_a_damaged_export_is_refused(change: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        import_model_from_safetensors(None, broken(tmp_path / "out", change))


def test_a_truncated_export_is_refused(tmp_path: Path) -> None:
    export_safetensors(quantized("int4_wo_64"), tmp_path / "out")
    shard = tmp_path / "out" / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="truncated"):
        import_model_from_safetensors(None, tmp_path / "out")


def test_a_float_checkpoint_is_no_export() -> None:
    with pytest.raises(CheckpointError, match="no quantization_config"):
        import_model_from_safetensors(None, tiny_model_dir())
