"""A layer whose input is rotated while it runs computes the same function.

All that looks at its input sees the rotated one.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quark.errors import CheckpointError, ConfigError
from quark.models.layers import quantized_class
from quark.torch import LLMTemplate
from quark_algos.mappings.mapping import readers_of_attention_norm, writers_of_mlp
from quark_algos.rotation.choice import block_size
from quark_algos.rotation.config import RotationConfig
from quark_algos.rotation.hadamard import Rotation
from quark_algos.rotation.online import InputRotation, base_order, install, is_own, is_rotated, matrix_of, rotate_input
from quark_algos.rotation.paley import as_published
from quark_algos.rotation.residual_stream import matching
from quark_algos.rotation.restore import buffer_name, expect_matrices

from .models import blocks_of, distance, facts_of, logits, model_of

FAMILIES = ["gemma", "gemma2", "gpt2", "gpt_neox", "llama", "mixtral", "olmo2", "opt", "phi", "phi3", "qwen3", "qwen3_moe", "stablelm"]


def some(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("layer", [nn.Linear(96, 5), Conv1D(5, 96)])
@pytest.mark.parametrize("size", [32, 96])
def test_the_layer_computes_what_it_did_from_a_rotated_input(layer: nn.Module, size: int) -> None:
    layer, x = deepcopy(layer).double(), some(3, 96)
    with torch.no_grad():
        before, weight = layer(x), layer.get_parameter("weight")
        copy, rotation = weight.clone(), InputRotation(size)
        rotate_input(layer, rotation)
        assert torch.equal(weight, copy)
        assert distance(layer.get_parameter("weight"), weight) > 0.1
        assert distance(rotation.apply(x), x) > 0.1
        assert distance(layer(x), before) < 1e-12
        assert distance(deepcopy(layer)(x), before) < 1e-12


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("which", ["r4", "readers"])
def test_a_model_whose_layers_get_rotated_inputs_computes_what_it_did(model_type: str, which: str) -> None:
    facts, model = facts_of(model_type), model_of(model_type)
    before, count = logits(model), 0
    names = writers_of_mlp(facts) if which == "r4" else [name for group in readers_of_attention_norm(facts) for name in group]
    for block in blocks_of(model, facts):
        for layer in matching(block, names).values():
            rotate_input(
                layer, InputRotation(Rotation.of(layer.get_parameter("weight").shape[0 if isinstance(layer, Conv1D) else 1]).block)
            )
            count += 1
    assert count >= 2
    assert distance(logits(model), before) < 1e-9


def test_hooks_that_were_there_before_and_the_quantized_layer_see_the_rotated_input() -> None:
    layer, x, seen = nn.Linear(64, 8), some(3, 64, dtype=torch.float32), []

    def see(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen.append(args[0])

    layer.register_forward_pre_hook(see)
    install(layer, InputRotation(64))
    config = LLMTemplate.get("llama").get_config("fp8").global_quant_config
    made = quantized_class(layer).from_float(layer, config)
    made.input_quantizer = None
    expected = InputRotation(64).apply(x)
    assert torch.equal(made(x), nn.functional.linear(expected, layer.weight, layer.bias))
    assert torch.equal(seen[0], expected)
    assert is_rotated(made)
    assert not is_rotated(nn.Linear(2, 2))


def test_an_input_is_rotated_once_and_in_blocks_that_divide_it() -> None:
    layer = nn.Linear(96, 5)
    with pytest.raises(ConfigError, match="width 96 is not a multiple of rotation_size 64"):
        rotate_input(layer, InputRotation(64))
    rotate_input(layer, InputRotation(96))
    with pytest.raises(ConfigError, match="already"):
        rotate_input(layer, InputRotation(96))
    with pytest.raises(ConfigError, match=r"input of 'a.b' cannot be rotated.*rotation_size 64"):
        block_size(RotationConfig(scaling_layers=[], rotation_size=64), "a.b", 96)


@pytest.mark.parametrize("size", [1, 2, 8, 12, 24, 40, 56, 80, 160, 384, 576, 1536])
def test_the_matrix_is_a_small_one_times_sylvesters(size: int) -> None:
    matrix, base = matrix_of(size).double(), base_order(size) or 1
    expected = as_published(base) if base > 1 else torch.ones(1, 1, dtype=torch.float64)
    while len(expected) < size:
        expected = torch.kron(expected, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64))
    assert torch.equal(matrix, expected)
    assert torch.equal(matrix @ matrix.t(), size * torch.eye(size, dtype=torch.float64))
    x = some(2, 2 * size)
    assert distance(InputRotation(size).apply(x).unflatten(-1, (2, size)), x.unflatten(-1, (2, size)) @ matrix / size**0.5) < 1e-12
    assert is_own(matrix.to(torch.int8))
    matrix[-1, -1] *= -1
    assert not is_own(matrix.to(torch.int8))


def test_the_matrices_of_tables_are_those_that_are_known() -> None:
    """First and second rows as AMD Quark 0.13 has them, one for each construction."""
    rows = {m: "".join("+" if v > 0 else "-" for v in as_published(m)[:2].flatten().tolist()) for m in (12, 28)}
    assert rows[12] == "+-----------" + "++-+---+++-+"
    assert rows[28] == "++++++++++++++-+++++++++++++" + "+++-++----++-++-+-++----++-+"


def test_a_matrix_that_comes_with_a_checkpoint_decides() -> None:
    model, x = nn.Sequential(nn.Linear(16, 4, dtype=torch.float64)), some(3, 16)
    rotation = InputRotation(8)
    install(model[0], rotation)
    expect_matrices(model, {8: rotation})
    foreign = matrix_of(8).flip(0)
    model.register_buffer(buffer_name(8), foreign)
    turned = (x.unflatten(-1, (2, 8)) @ foreign.double() / 8**0.5).flatten(-2)
    with torch.no_grad():
        assert distance(model(x), nn.functional.linear(turned, model[0].weight, model[0].bias)) < 1e-12


@pytest.mark.parametrize("found", [torch.zeros(8, 8, dtype=torch.int8), torch.ones(8, 8, dtype=torch.int8)])
def test_a_matrix_that_is_none_stops_the_first_forward(found: Tensor) -> None:
    model, rotation = nn.Sequential(nn.Linear(16, 4)), InputRotation(8)
    expect_matrices(model, {8: rotation})
    model.register_buffer(buffer_name(8), found)
    with pytest.raises(CheckpointError, match="'shared_input_rotation_8' of the checkpoint is missing or wrong"):
        model(torch.zeros(1, 16))
