"""Calibration of a graph: whose error is reported."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from quark.calibration.batches import Call
from quark.errors import CalibrationError, NonFiniteError, QuarkError
from quark_graph.insertion import observe


class Raising(nn.Module):
    """Raises an error instead of a forward."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error


def observed_with(error: Exception) -> None:
    root = nn.Module()
    root.add_module("observer", Raising(error))
    graph = fx.Graph()
    graph.output(graph.call_module("observer", (graph.placeholder("x"),)))
    observe(fx.GraphModule(root, graph), [], [Call((torch.zeros(1),))])


def test_an_error_that_names_its_cause_and_fix_is_raised_as_it_is() -> None:
    error = NonFiniteError("a tensor holds NaN", tensor="x")
    with pytest.raises(QuarkError) as raised:
        observed_with(error)
    assert raised.value is error


def test_any_other_error_is_told_with_the_batch_and_the_inputs() -> None:
    with pytest.raises(
        CalibrationError, match=r"calibration batch 0 \(RuntimeError: shapes\)\. Give batches that have only its inputs \(x"
    ):
        observed_with(RuntimeError("shapes"))
