"""Checks of plugins' work: the tensors that a transform has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quark.algorithms import TransformRun
from quark.calibration.plugin_checks import StartedTransform
from quark.models.plan.decoder_blocks import Block


class Doubles(TransformRun):
    """The run of a transform that doubles one tensor before the blocks."""

    def __init__(self, tensor: str) -> None:
        self.tensor = tensor

    @torch.no_grad()
    def apply_global(self, model: nn.Module) -> None:
        model.get_parameter(self.tensor).mul_(2)


@pytest.mark.parametrize(("tensor", "expected"), [("blocks.0.weight", False), ("head.weight", True)])
def test_a_started_transform_has_changed_the_model_outside_its_blocks_if_a_tensor_there_is_another(tensor: str, expected: bool) -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2)]), "head": nn.Linear(2, 2)})
    run: Any = Doubles(tensor)
    started = StartedTransform(run)
    started.apply_global(model, [Block("blocks.0", model.get_submodule("blocks.0"))])
    assert started.has_changed_outside is expected
