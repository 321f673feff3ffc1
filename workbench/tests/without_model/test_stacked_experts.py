"""Stacked experts, told apart by names and shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quark.errors import UnsupportedError
from quark_workbench.without_model.stacked_experts import StackedExperts, is_stack, parts_of_stack

E, H, WIDE = 3, 8, 4
NAMES = ("gate_proj", "up_proj", "down_proj")


def stack(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name.replace("__", "."): torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in matrices(tensors).items()}


def matrices(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    assert is_stack("model.layers.0.mlp.experts", tensors, H)
    parts = parts_of_stack(StackedExperts(tensors, H), NAMES)
    assert parts is not None
    return parts.weights


@pytest.mark.parametrize("hidden", [H, 2 * WIDE, WIDE])
def test_gate_and_up_are_halves_whichever_way_they_are_stored(hidden: int) -> None:
    usual = stack(gate_up_proj=(E, 2 * WIDE, hidden), down_proj=(E, hidden, WIDE))
    turned = {name: tensor.transpose(1, 2).contiguous() for name, tensor in usual.items()}
    for tensors in (usual, turned):
        weights = matrices(tensors)
        assert [*weights] == [*NAMES]
        assert torch.equal(torch.cat([weights["gate_proj"], weights["up_proj"]], 1), usual["gate_up_proj"])
        assert torch.equal(weights["down_proj"], usual["down_proj"])


def test_with_biases_gate_and_up_stay_one_since_they_may_be_in_turns() -> None:
    tensors = stack(gate_up_proj=(E, H, 2 * WIDE), down_proj=(E, WIDE, H), gate_up_proj_bias=(E, 2 * WIDE), down_proj_bias=(E, H))
    assert shapes(tensors) == {
        "gate_up_proj": (E, 2 * WIDE, H),
        "down_proj": (E, H, WIDE),
    }


def test_of_another_name_or_order_each_tensor_stays_one() -> None:
    assert [*matrices(stack(w13_weight=(E, 2 * WIDE, H), w2_weight=(E, H, WIDE)))] == ["w13", "w2"]
    assert [*matrices(stack(fc1__weight=(E, H, 2 * WIDE), fc2__weight=(E, WIDE, H)))] == ["fc1", "fc2"]


def test_three_tensors_are_told_by_the_width_of_the_hidden_states() -> None:
    tensors = stack(w1=(E, H, WIDE), w2=(E, WIDE, H), w3=(E, H, WIDE))
    assert shapes(tensors) == {
        "w1": (E, WIDE, H),
        "w3": (E, WIDE, H),
        "w2": (E, H, WIDE),
    }
    assert not is_stack("mlp.experts", tensors, None)
    assert not is_stack("mlp.experts", stack(w1=(E, H, H), w2=(E, H, H), w3=(E, H, H)), H), "square matrices have no order"


@pytest.mark.parametrize(
    "tensors",
    [
        stack(down_proj=(E, H, WIDE)),
        stack(gate_up_proj=(E, 2 * WIDE, H)),
        stack(gate_up_proj=(E, 2 * WIDE, H), down_proj=(E + 1, H, WIDE)),
        stack(gate_up_proj=(E, 2 * WIDE, H), down_proj=(E, H, WIDE), table=(3,)),
        stack(gate_up_proj=(E, 2 * WIDE, H), down_proj=(E, H, WIDE), down_proj_bias=(E, WIDE)),
    ],
)
def test_what_does_not_fit_stays_as_it_is(tensors: dict[str, Tensor]) -> None:
    assert not is_stack("mlp.experts", tensors, H)


def test_only_experts_are_taken_apart() -> None:
    assert not is_stack("model.layers.0.mlp", stack(gate_up_proj=(E, 2 * WIDE, H), down_proj=(E, H, WIDE)), H)
    assert parts_of_stack(torch.nn.Linear(2, 2), NAMES) is None


def test_they_cannot_run() -> None:
    experts = StackedExperts(stack(gate_up_proj=(E, 2 * WIDE, H), down_proj=(E, H, WIDE)), H)
    with pytest.raises(UnsupportedError, match="without its model"):
        experts(torch.ones(1, H))
    parts = parts_of_stack(experts, NAMES)
    assert parts is not None
    with pytest.raises(UnsupportedError, match="without its model"):
        parts.gate([])
