"""Models that are one layer: quantized in place, exported and read back as any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.errors import ConfigError
from quark.models.layers import QuantConv2d, QuantEmbedding, QuantizedLayer, QuantLinear
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors


def layer_config(scheme: str) -> QLayerConfig:
    return LLMTemplate.get("llama").get_config(scheme=scheme).global_quant_config


CASES: dict[str, tuple[Any, type, torch.Tensor]] = {
    "linear": (lambda: nn.Linear(64, 32), QuantLinear, torch.randn(5, 64, generator=torch.Generator().manual_seed(1))),
    "convolution": (lambda: nn.Conv2d(4, 8, 3), QuantConv2d, torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bare_layer_is_quantized_in_place_as_it_is_inside_a_model(name: str) -> None:
    make, quantized_class, x = CASES[name]
    config = QConfig(global_quant_config=layer_config("int8"))
    torch.manual_seed(0)
    layer = make()
    inside = nn.Sequential(make())
    inside[0].load_state_dict(layer.state_dict())
    model = ModelQuantizer(config).quantize_model(layer, [x])
    ModelQuantizer(config).quantize_model(inside, [x])
    assert model is layer
    assert isinstance(layer, quantized_class)
    assert torch.equal(layer(x), inside(x))
    assert layer.quark_quantized
    assert [row.name for row in layer.quark_plan.quantized] == ["layer"]
    with pytest.raises(ConfigError, match="quantized already"):
        ModelQuantizer(config).quantize_model(layer, [x])
    assert ModelQuantizer.freeze(layer) is layer


def test_a_bare_layer_that_nothing_quantizes_stays_what_it_was() -> None:
    layer = nn.Linear(64, 32)
    config = QConfig(global_quant_config=layer_config("int8"), exclude=["layer"])
    assert type(ModelQuantizer(config).quantize_model(layer)) is nn.Linear
    assert not ModelQuantizer(config).plan(layer).quantized


def test_a_bare_embedding_is_quantized_where_its_type_is_named() -> None:
    layer = nn.Embedding(10, 64)
    config = QConfig(global_quant_config=QLayerConfig(), layer_type_quant_config={nn.Embedding: layer_config("int4_wo_32")})
    assert isinstance(ModelQuantizer(config).quantize_model(layer), QuantEmbedding)
    assert isinstance(layer, QuantizedLayer)
    assert not torch.equal(layer.weight, nn.Embedding(10, 64).weight)


@pytest.mark.parametrize("weight_format", ["real_quantized", "fake_quantized"])
@pytest.mark.parametrize("name", CASES)
def test_a_bare_layer_is_exported_and_read_back(name: str, weight_format: str, tmp_path: Path) -> None:
    make, quantized_class, x = CASES[name]
    layer = ModelQuantizer(QConfig(global_quant_config=layer_config("int8"))).quantize_model(make(), [x])
    export_safetensors(layer, tmp_path / "out", weight_format=weight_format)
    given = make()
    back = import_model_from_safetensors(given, tmp_path / "out")
    assert back is given
    assert isinstance(back, quantized_class)
    assert torch.equal(back(x), layer(x))
    export_safetensors(back, tmp_path / "again", weight_format=weight_format)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "out" / file).read_bytes()
