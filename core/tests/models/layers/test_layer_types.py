"""Layer types of the core: quantized classes, their layouts, and the reach of a global configuration."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quark.models.layers.layer_types import layer_types, planned_names

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
