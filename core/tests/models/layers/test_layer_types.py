"""Layer types of the core: quantized classes, their layouts, and the reach of a global configuration."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.bart.modeling_bart import BartScaledWordEmbedding
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.models.layers.layer_types import layer_type_of, layer_types, planned_names
from quark.models.layers.layers_from_codes import RunsFromCodes
from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.quantization import Int8PerChannelSpec

BY_NAME = {"conv1d", "conv3d", "conv_transpose1d", "conv_transpose3d", "embedding", "embedding_bag"}
TRANSPOSED = {"transformers_conv1d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}


def test_layers_that_only_a_name_reaches_and_those_stored_transposed_are_these() -> None:
    records = {record.name: record for record in layer_types()}
    assert {name for name, record in records.items() if record.by_name} == BY_NAME
    assert {name for name, record in records.items() if record.transposed} == TRANSPOSED
    assert {name for name, record in records.items() if record.lookup} == {"embedding", "embedding_bag"}
    assert {name: record.planned_as for name, record in records.items() if record.planned_as} == {"transformers_conv1d": "linear"}


def test_a_configuration_may_name_the_classes_that_layers_are_planned_as() -> None:
    kinds = ["Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "Embedding", "EmbeddingBag", "Linear"]
    assert [name.rpartition(".")[2] for name in planned_names()] == sorted(kinds)


@pytest.mark.parametrize("name", sorted(TRANSPOSED - {"transformers_conv1d"}))
def test_a_transposed_layer_has_its_input_channels_first(name: str) -> None:
    layer = layer_types().load_layer(name)(2, 6, 1)
    assert isinstance(layer, nn.Module)
    assert isinstance(layer.weight, torch.Tensor)
    assert tuple(layer.weight.shape[:2]) == (2, 6)


class Shifted(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + 1


class Squared(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) ** 2


class ByToken(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * (1 + ids[..., None])


SCALED: dict[str, Callable[[], nn.Module]] = {
    "a buffer": lambda: Gemma3TextScaledWordEmbedding(8, 4, 0, embed_scale=3.3),
    "an attribute": lambda: BartScaledWordEmbedding(8, 4, 0, embed_scale=1.7),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", SCALED)
def test_an_embedding_that_multiplies_its_rows_by_a_constant_is_an_embedding(name: str, device: str) -> None:
    with torch.device(device):
        layer_type = layer_type_of(SCALED[name]())
    assert layer_type is not None
    assert layer_type.planned_name == "embedding"


@pytest.mark.parametrize("kind", [Shifted, Squared, ByToken])
def test_an_embedding_that_computes_something_else_is_none(kind: type[nn.Module]) -> None:
    assert layer_type_of(kind(8, 4)) is None


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SCALED)
def test_a_quantized_scaled_embedding_multiplies_as_its_class_does_with_values_and_from_codes(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, ids = SCALED[name]().to(dtype), torch.tensor([[0, 7, 3], [3, 3, 1]])
    net = nn.ModuleDict({"words": layer})
    int8 = QLayerConfig(weight=Int8PerChannelSpec(symmetric=True, ch_axis=0, is_dynamic=False).to_quantization_spec())
    ModelQuantizer(QConfig(QLayerConfig(), layer_quant_config={"words": int8})).quantize_model(net)
    quantized: Any = net["words"]
    layer.weight.data = quantized.weight.data  # type: ignore[union-attr]
    assert isinstance(quantized, type(layer))
    assert torch.equal(quantized(ids), layer(ids))
    assert torch.equal(copy.deepcopy(quantized)(ids), layer(ids))
    with tempfile.TemporaryDirectory() as folder:
        export_safetensors(net, folder)
        packed: Any = import_model_from_safetensors(nn.ModuleDict({"words": SCALED[name]().to(dtype)}), folder, packed=True)["words"]  # type: ignore[index]
        assert isinstance(packed, RunsFromCodes)
        for one in (packed, copy.deepcopy(packed), packed.unpack()):
            assert torch.equal(one(ids), layer(ids))
