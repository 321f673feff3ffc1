"""AMD Quark's save_params and load_params."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from quark.config.enums import QuantizationMode
from quark.errors import CheckpointError, ConfigError, OutputError, UnsupportedError
from quark.torch import ModelQuantizer, load_params, save_params
from quark_tiny_model import tiny_model, tiny_template

IDS = torch.arange(8)[None]


def quantized() -> nn.Module:
    return ModelQuantizer(tiny_template().get_config("uint4_wo_32")).quantize_model(tiny_model())


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits  # type: ignore[no-any-return]


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    model, sizes = quantized(), []
    for compressed in (False, True):
        out = tmp_path / str(compressed)
        save_params(model, "llama", export_dir=out, compressed=compressed)
        assert sorted(path.name for path in out.iterdir()) == ["llama.json", "llama.safetensors"]
        float_model = tiny_model()
        loaded = load_params(float_model, json_path=out / "llama.json", safetensors_path=out / "llama.safetensors", compressed=compressed)
        assert loaded is float_model
        assert torch.equal(logits(loaded), logits(model))
        sizes.append((out / "llama.safetensors").stat().st_size)
    assert sizes[1] < sizes[0] / 2


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    model = quantized()
    save_params(model, "llama", export_dir=tmp_path)
    with pytest.raises(OutputError, match=r"llama\.json' exists"):
        save_params(model, "llama", export_dir=tmp_path)
    with pytest.raises(ConfigError, match="a name without directories"):
        save_params(model, "../llama", export_dir=tmp_path)
    with pytest.raises(CheckpointError, match=r"there is no file '/nowhere\.safetensors'\. Give the path of the \.safetensors file"):
        load_params(tiny_model(), tmp_path / "llama.json", "/nowhere.safetensors")
    with pytest.raises(ConfigError, match="Give a float model"):
        load_params(None, tmp_path / "llama.json", tmp_path / "llama.safetensors")
    for refused in (
        lambda: save_params(model, "x", quant_mode=QuantizationMode.fx_graph_mode),
        lambda: load_params(pth_path="x.pth", quant_mode=QuantizationMode.fx_graph_mode),
    ):
        with pytest.raises(UnsupportedError, match=r"torch\.export\.save"):
            refused()
