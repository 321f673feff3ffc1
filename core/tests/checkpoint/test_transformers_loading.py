"""``from_pretrained`` returns the exported model, or raises an error that names the cause.

Older loaders are imitated.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, conversion_mapping, modeling_utils

from quark.base.version import transformers_version
from quark.checkpoint import running_from_codes, transformers_loading
from quark.checkpoint.transformers_loading import load_checkpoint
from quark.errors import CheckpointError, UnsupportedError
from quark.models.hf.loading import load_model
from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark_tiny_model import calibration_batches, tiny_model, tiny_template

IDS = torch.arange(40).reshape(2, 20)
LOST = "model.layers.0.mlp.up_proj.weight_scale"


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def exported(directory: Path, scheme: str = "int4_wo_64", kind: str = "llama") -> torch.Tensor:
    """Export a model to a directory, and return its logits."""
    model = tiny_model(kind=kind)
    ModelQuantizer(tiny_template(kind).get_config(scheme)).quantize_model(model, calibration_batches(1, 16))
    export_safetensors(model, directory)
    return logits(model)


@pytest.fixture
def greedy_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let patterns of conversions match the begin of a longer name, as up to transformers 5.20."""
    real = conversion_mapping.get_model_conversion_mapping

    def greedy(*args: Any, **kwargs: Any) -> list[Any]:
        transforms: list[Any] = real(*args, **kwargs)
        for transform in transforms:
            transform.compiled_sources = re.compile(transform.compiled_sources.pattern.replace(r"(?!\w)", ""))
        return transforms

    for module in (conversion_mapping, modeling_utils):
        monkeypatch.setattr(module, "get_model_conversion_mapping", greedy)


@pytest.fixture
def losing_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide one tensor from the loader."""
    real = modeling_utils.convert_and_load_state_dict_in_model

    def losing(model: Any, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return real(model, {name: tensor for name, tensor in state_dict.items() if name != LOST}, *args, **kwargs)

    monkeypatch.setattr(modeling_utils, "convert_and_load_state_dict_in_model", losing)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", ["auto", "float32", "float16"])
def test_the_reader_here_gives_the_model_of_that_of_transformers(
    dtype: str, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    exported(tmp_path)
    expected = load_model(tmp_path, dtype, packed=packed)
    monkeypatch.setattr(transformers_loading, "is_read_here", lambda method: False)
    model = load_checkpoint(tmp_path, dtype, packed=packed)
    assert "quark's reader of the layout 'safetensors'" in caplog.text
    assert {tensor.dtype for tensor in model.parameters()} == {tensor.dtype for tensor in expected.parameters()}
    assert torch.equal(logits(model), logits(expected))


@pytest.mark.usefixtures("greedy_loader")
@pytest.mark.parametrize("from_codes", [False, True])
@pytest.mark.parametrize("scheme", ["int4_wo_64", "fp8", "nvfp4", "uint4_wo_64"])
def test_experts_load_where_the_loader_takes_their_scales_for_parts_of_fused_experts(scheme: str, from_codes: bool, tmp_path: Path) -> None:
    expected = exported(tmp_path, scheme, kind="mixture")
    with running_from_codes(from_codes):
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(model), expected)
    assert torch.equal(logits(import_model_from_safetensors(None, tmp_path)), expected)


@pytest.mark.parametrize("load", [AutoModelForCausalLM.from_pretrained, load_model])
@pytest.mark.usefixtures("losing_loader")
def test_a_tensor_that_the_loader_loses_is_its_fault_and_not_that_of_the_file(load: Callable[[Path], object], tmp_path: Path) -> None:
    exported(tmp_path)
    with pytest.raises(UnsupportedError, match=rf"transformers {transformers_version()} does not load 1 tensor.*up_proj") as caught:
        load(tmp_path)
    assert f"but '{tmp_path}' holds them. Read this checkpoint with quark.checkpoint.import_model_from_safetensors" in str(caught.value)


def test_a_tensor_that_no_file_has_is_the_fault_of_the_checkpoint(tmp_path: Path) -> None:
    exported(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[LOST]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"has no values for 1 tensor.*up_proj.*The checkpoint is incomplete"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_zero_points_that_an_export_leaves_out_are_zero(tmp_path: Path) -> None:
    expected = exported(tmp_path, "int4_wo_64")
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("zero_point")}
    assert len(kept) < len(tensors)
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(not tensor.any() for name, tensor in model.state_dict().items() if name.endswith("zero_point"))
    assert torch.equal(logits(model), expected)


def test_the_model_without_a_head_loads_too(tmp_path: Path) -> None:
    exported(tmp_path)
    with torch.no_grad():
        expected = import_model_from_safetensors(None, tmp_path).model(IDS).last_hidden_state  # type: ignore[operator]
        assert torch.equal(AutoModel.from_pretrained(tmp_path)(IDS).last_hidden_state, expected)


def test_a_head_that_the_export_has_no_values_for_is_not_made_up(tmp_path: Path) -> None:
    exported(tmp_path)
    with pytest.raises(CheckpointError, match=r"LlamaForSequenceClassification: score\.weight.*or it belongs to another model class"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path)


def test_a_class_may_initialize_fused_experts_by_their_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = exported(tmp_path / "out", kind="mixture")
    model = tiny_model(kind="mixture")
    block, initialize = type(model.model.layers[0].mlp), modeling_utils.PreTrainedModel._init_weights
    asked: list[str] = []

    def with_experts(self: Any, module: nn.Module) -> None:
        initialize(self, module)
        if isinstance(module, block):
            asked.append(str(module.experts.gate_up_proj.shape))

    monkeypatch.setattr(type(model).__mro__[1], "_init_weights", with_experts)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), expected)
    type(model)(model.config)
    assert asked
