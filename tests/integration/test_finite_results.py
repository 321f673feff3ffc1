"""NaN and Inf in any tensor of a model are refused by its name, before a block is quantized or when it is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quark.checkpoint.export import export_with
from quark.config.model import QConfig
from quark.errors import NonFiniteError
from quark.models.hf.loading import load_model
from quark.runs import ModelQuantizer, quantize_checkpoint
from quark.torch import LLMTemplate

from .interrupted import checkpoint

PLACES = [
    ("qwen2", "model.norm.weight"),
    ("qwen2", "model.embed_tokens.weight"),
    ("qwen2", "lm_head.weight"),
    ("qwen2", "model.layers.0.self_attn.q_proj.weight"),
    ("qwen2", "model.layers.0.self_attn.q_proj.bias"),
    ("qwen2", "model.layers.2.self_attn.v_proj.bias"),
    ("qwen2", "model.layers.2.input_layernorm.weight"),
    ("mixtral", "model.layers.0.block_sparse_moe.gate.weight"),
    ("mixtral", "model.layers.0.block_sparse_moe.experts.1.w2.weight"),
]
"""A stored tensor of each kind."""


def in_model(stored: str) -> str:
    """The name in the model, or its beginning."""
    return stored.replace("block_sparse_moe", "mlp").partition(".1.w2")[0]


def config(family: str) -> QConfig:
    return LLMTemplate.get(family).get_config(scheme="int4_wo_32")


def source_with(directory: Path, family: str, name: str, value: float) -> Path:
    """A checkpoint in bfloat16 in which a tensor has one such number."""
    more = {"tie_word_embeddings": False} | ({"num_local_experts": 2} if family == "mixtral" else {})
    checkpoint(directory, family, **more)
    tensors = load_file(directory / "model.safetensors")
    tensors[name].view(-1)[3] = value
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("family", "name"), PLACES)
def test_a_checkpoint_is_blamed_for_what_it_holds(family: str, name: str, value: float, tmp_path: Path, quantized: list[str]) -> None:
    source = source_with(tmp_path / "source", family, name, value)
    with pytest.raises(NonFiniteError, match="The checkpoint is damaged or comes from a diverged training") as error:
        quantize_checkpoint(source, tmp_path / "disk", config(family), dtype="float16" if value > 0 else "auto")
    assert in_model(name) in str(error.value)
    assert quantized == [] or "layers.0" in name
    with pytest.raises(NonFiniteError, match="Nothing has been changed") as error:
        ModelQuantizer(config(family)).quantize_model(load_model(source))
    assert in_model(name) in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(("family", "name"), PLACES)
def test_a_cast_is_blamed_for_what_it_makes(family: str, name: str, tmp_path: Path) -> None:
    source = source_with(tmp_path / "source", family, name, 1e6)
    with pytest.raises(NonFiniteError, match=r"The checkpoint is intact, but has values up to 999424 there, which float16 cannot") as error:
        quantize_checkpoint(source, tmp_path / "out", config(family), dtype="float16")
    assert in_model(name) in str(error.value)
    assert "damaged" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    quantize_checkpoint(source, tmp_path / "out", config(family))


def test_what_becomes_infinite_behind_that_check_is_not_written(tmp_path: Path) -> None:
    model = ModelQuantizer(config("llama")).quantize_model(load_model(checkpoint(tmp_path / "source")))
    model.get_submodule("model.layers.1.input_layernorm").weight.data[2] = float("inf")
    with pytest.raises(NonFiniteError, match=r"model\.layers\.1\.input_layernorm\.weight.*They were finite before"):
        export_with("safetensors", model, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_tensor_that_is_carried_over_with_nan_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = checkpoint(tmp_path / "source")
    tensors = load_file(source / "model.safetensors") | {"mtp.norm.weight": torch.tensor([float("nan")])}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    quantize_checkpoint(source, tmp_path / "out", config("llama"))
    assert "'mtp.norm.weight' in " in caplog.text
    assert "holds NaN or Inf, and is copied unchanged" in caplog.text
