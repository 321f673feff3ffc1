"""A layer whose input is rotated while it runs computes what it did, and is stored and loaded with its rotation."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quark.errors import ConfigError
from quark_algos.rotate.hadamard import Rotation
from quark_algos.rotate.online import OnlineRotation, install, rotate_input

from .models import blocks_of, distance, facts_of, logits, model_of


@pytest.mark.parametrize("layer", [nn.Linear(96, 5), Conv1D(5, 96)])
def test_the_layer_computes_what_it_did_from_a_rotated_input(layer: nn.Module) -> None:
    layer = layer.double()
    x = torch.randn(3, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before, weight = layer(x), layer.get_parameter("weight")
        copy = weight.clone()
        online = rotate_input(layer, Rotation.of(96, 32, seed=1))
        assert torch.equal(weight, copy)
        assert distance(layer.get_parameter("weight"), weight) > 0.1
        assert distance(online(x), x) > 0.1
        assert distance(layer(x), before) < 1e-12
        assert distance(deepcopy(layer)(x), before) < 1e-12


def test_a_model_with_r4_computes_what_it_did() -> None:
    facts, model = facts_of("llama"), model_of("llama")
    before = logits(model)
    for block in blocks_of(model, facts):
        rotate_input(block.get_submodule(facts.mlp_output or ""), Rotation.of(64))
    assert distance(logits(model), before) < 1e-9


@pytest.mark.parametrize("keeps_mean", [False, True])
def test_a_state_that_is_loaded_brings_the_rotation(keeps_mean: bool) -> None:
    layer, other = nn.Linear(96, 5), nn.Linear(96, 5)
    rotate_input(layer, Rotation.of(96, 32, seed=1, keeps_mean=keeps_mean))
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(0))
    install(other, OnlineRotation.of_width(96))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))


def test_an_input_is_rotated_once() -> None:
    layer = nn.Linear(96, 5)
    with pytest.raises(ConfigError, match="width 64"):
        rotate_input(layer, Rotation.of(64))
    rotate_input(layer, Rotation.of(96))
    with pytest.raises(ConfigError, match="already"):
        rotate_input(layer, Rotation.of(96))
