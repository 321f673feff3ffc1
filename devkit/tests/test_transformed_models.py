"""Parts that a transform adds to a model or removes from it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from quark_devkit.transformed_models import HOOKS, changed_parts

Change = Callable[[nn.Module], object]


def model() -> nn.Module:
    """A layer with a hook, beside a normalization with buffers."""
    result = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    result[0].register_forward_hook(_nothing)
    return result.eval().requires_grad_(False)


def _nothing(*_: object) -> None:
    pass


CHANGES: dict[str, Change] = {
    "adds the hook of '0' in _forward_hooks": lambda model: model[0].register_forward_hook(_nothing),  # type: ignore[index]
    "removes the hook of '0' in _forward_hooks": lambda model: model[0]._forward_hooks.clear(),  # type: ignore[index]
    "adds the hook of '' in _load_state_dict_post_hooks": lambda model: model.register_load_state_dict_post_hook(_nothing),
    "adds the buffer factors [3] torch.float32": lambda model: model.register_buffer("factors", torch.ones(3)),
    "removes the buffer 1.running_mean [2] torch.float32": lambda model: delattr(model[1], "running_mean"),  # type: ignore[index]
    "removes the parameter 0.bias [2] torch.float32": lambda model: setattr(model[0], "bias", None),  # type: ignore[index]
    "adds the module 1 (BatchNorm1d) in training mode": lambda model: model[1].train(),  # type: ignore[index]
    "adds the parameter 0.bias [2] torch.float32 that requires gradients": lambda model: model[0].bias.requires_grad_(),  # type: ignore[index, union-attr]
    "adds the module 2 (Identity)": lambda model: model.append(nn.Identity().eval()),  # type: ignore[operator]
}


@pytest.mark.parametrize("says", CHANGES)
def test_a_part_that_one_model_has_more_is_told(says: str) -> None:
    before, after = model(), model()
    CHANGES[says](after)
    assert says in changed_parts(before, after)
    assert len(changed_parts(before, after)) == 1 + says.endswith((" in training mode", " that requires gradients"))


def test_of_the_same_parts_none_is_told_whatever_their_values_are() -> None:
    before = model()
    after = copy.deepcopy(before)
    after.load_state_dict({name: values + 1 for name, values in after.state_dict().items()})
    assert changed_parts(before, after) == []


def test_every_kind_of_hook_of_torch_is_looked_at() -> None:
    kinds = {name for name in vars(nn.Module()) if name.endswith("_hooks")}
    assert kinds <= set(HOOKS)
