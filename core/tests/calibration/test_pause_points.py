"""The tokens that a pause point collects, held out or not; pause points of layers and of experts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quark.calibration.batches import Call
from quark.calibration.pause_points import PausePoint, pooled_experts, tokens_of
from quark.config.layer import QLayerConfig
from quark.models.layers import QuantLinear
from quark.models.plan.decoder_blocks import Block
from quark_devkit.example_specs import int8_spec

X = torch.arange(24.0).reshape(2, 4, 3)
HELD = torch.tensor([[0, 0, 0, 1], [0, 1, 0, 0]]).bool()


def numbers(x: Tensor) -> list[int]:
    """Return the numbers of the tokens, by position."""
    return (x[:, 0] / 3).int().tolist()


@pytest.mark.parametrize("x", [X, X.flatten(0, 1)])
@pytest.mark.parametrize(("held_out", "expected"), [(None, list(range(8))), (True, [3, 5]), (False, [0, 1, 2, 4, 6, 7])])
def test_each_token_is_in_one_of_the_two_parts(x: Tensor, held_out: bool | None, expected: list[int]) -> None:
    assert numbers(tokens_of(x, Call(held_out=HELD), held_out=held_out)) == expected


def test_of_a_call_without_any_nothing_is_held_out() -> None:
    assert numbers(tokens_of(X, Call(), held_out=False)) == list(range(8))
    assert len(tokens_of(X, Call(), held_out=True)) == 0


def test_a_row_that_is_held_out_is_so_with_all_its_places() -> None:
    call = Call(held_out=torch.tensor([[False], [True]]))
    assert numbers(tokens_of(X[:, :, None], call, held_out=True)) == [4, 5, 6, 7]


def test_tokens_routed_to_an_expert_are_held_out_with_the_whole_of_their_call_alone() -> None:
    routed = X.flatten(0, 1)[[5, 1, 3]]
    part, whole = Call(held_out=HELD), Call(held_out=torch.ones_like(HELD))
    assert numbers(tokens_of(routed, part, held_out=False)) == [5, 1, 3]
    assert len(tokens_of(routed, part, held_out=True)) == 0
    assert len(tokens_of(routed, whole, held_out=False)) == 0
    assert numbers(tokens_of(routed, whole, held_out=True)) == [5, 1, 3]


@pytest.mark.parametrize("config", [QLayerConfig(weight=int8_spec()), QLayerConfig()], ids=["with a quantizer", "float"])
def test_a_pause_point_that_is_reopened_takes_back_the_weight_and_the_codes_that_came_with_the_layer(config: QLayerConfig) -> None:
    layer: Any = nn.Linear(4, 2)
    nobody: Any = None
    quantized = QuantLinear.from_float(layer, config)
    quantizer, codes = quantized.weight_quantizer, torch.ones(2, 4, dtype=torch.int8)
    if quantizer is not None:
        quantizer.codes = codes
    point = PausePoint("layer", 0, layer, quantized, nobody)
    quantized.weight = nn.Parameter(torch.zeros(2, 4), requires_grad=False)
    if quantizer is not None:
        quantizer.codes = None
    point.done()
    point.reopen()
    assert not point.is_done
    assert torch.equal(quantized.weight, layer.weight)
    assert quantizer is None or quantizer.codes is codes


@pytest.mark.parametrize(("inside", "caller"), [("mlp.experts", "mlp"), ("experts", "")])
@pytest.mark.parametrize("is_list", [True, False])
def test_experts_are_called_by_the_parent_of_their_list_or_by_the_module_that_holds_them(inside: str, caller: str, is_list: bool) -> None:
    experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) if is_list else nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    block = Block("layers.0", nn.Module())
    holder = block.module
    for name in filter(None, [caller]):
        holder.add_module(name, nn.Module())
        holder = holder.get_submodule(name)
    holder.add_module("experts", experts)
    names = [f"layers.0.{inside}.{i}" for i in range(2)]
    of_experts = SimpleNamespace(projection=lambda name: f"layers.0.{inside}.*.proj")
    scales, run = SimpleNamespace(experts=of_experts, pool_of=lambda name: names), None
    ((module, point),) = pooled_experts(block, names, scales, run)  # type: ignore[arg-type]
    wanted = caller if is_list else inside
    assert module is block.module.get_submodule(wanted)
    assert (point.name, point.number) == (f"layers.0.{wanted}", 1.5)
