"""Layers with fewer outputs than inputs keep their output in the float model instead of their input."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

import quark_tiny_model as tiny
from quark.algorithms import CrossMoment, OutputMoment
from quark.base.ranks import Ranks
from quark.calibration.batches import calls
from quark.models.plan.family import architecture_of
from quark.models.plan.quant_plan import make_plan
from quark.runs.quantize_block import quantize_blocks
from quark.runs.sink import InPlaceSink
from quark_devkit.threads import in_threads

from ..hand_made_runs import hand_made_run
from .test_block_rounding import IDS, FloatInputs, Spy, config, quantized


class ErrorMoment(CrossMoment):
    of_outputs = OutputMoment


def down_with_bias() -> Any:
    """The tiny model; down projections, which have fewer outputs than inputs, have a bias."""
    model = tiny.tiny_model()
    for number, layer in enumerate(model.model.layers):
        plain = layer.mlp.down_proj
        layer.mlp.down_proj = nn.Linear(plain.in_features, plain.out_features)
        layer.mlp.down_proj.weight = plain.weight
        nn.init.normal_(layer.mlp.down_proj.bias, std=0.1, generator=torch.Generator().manual_seed(number))
    return model


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_layer_with_fewer_outputs_than_inputs_is_known_by_its_float_output(ranks: int) -> None:
    models = [down_with_bias() for _ in range(ranks + 1)]
    weights = {name: module.weight.detach().double() for name, module in down_with_bias().named_modules() if name.endswith("down_proj")}

    def run(ranks: Ranks, spy: Spy) -> Spy:
        model = models.pop()
        started = hand_made_run(model, make_plan(model, config(), architecture_of(model)), calls([*IDS, *IDS]), spy)
        quantize_blocks(attrs.evolve(started, run=attrs.evolve(started.run, ranks=ranks)), InPlaceSink(model))
        return spy

    (inputs,) = in_threads(lambda ranks: run(ranks, Spy(FloatInputs)), 1)
    for found in in_threads(lambda ranks: run(ranks, Spy(ErrorMoment)), ranks):
        for task, by_inputs in zip(found.tasks, inputs.tasks, strict=True):
            name = next(iter(task.layers))
            is_known = name.endswith("down_proj")
            assert list(task.statistics) == [OutputMoment if is_known else ErrorMoment], name
            assert task.held_out is not None
            assert (task.held_out.float_outputs is not None) == is_known == (task.held_out.reference is None)
            if not is_known:
                continue
            seen = by_inputs.statistic(FloatInputs)
            y, x = torch.cat(seen.float_seen).double() @ weights[name].t(), torch.cat(seen.seen).double()
            moment, outputs = task.statistic(OutputMoment).matrix(), task.held_out.outputs(weights[name])
            assert not moment.requires_grad
            assert not outputs.requires_grad
            assert by_inputs.held_out is not None
            for value, expected in ((moment, y.t() @ x), (outputs, by_inputs.held_out.outputs(weights[name]))):
                assert torch.linalg.matrix_norm(value - expected) < 1e-5 * torch.linalg.matrix_norm(expected)


def test_float_forwards_go_on_with_the_output_that_a_layer_is_known_by() -> None:
    outputs = []
    for kind in (CrossMoment, ErrorMoment):
        spy = Spy(kind)
        quantized(tiny.tiny_model(), config(), spy)
        moments = {next(iter(task.layers)): task.statistics.get(kind) for task in spy.tasks}
        outputs.append([moment.matrix() for name, moment in moments.items() if not name.endswith("down_proj")])  # type: ignore[union-attr]
    assert outputs[0]
    assert all(torch.equal(*pair) for pair in zip(*outputs, strict=True))


def test_a_layer_that_turns_out_to_read_the_input_of_the_one_before_has_its_own_moment() -> None:
    """The layer's float output differs from that of the layer before."""

    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = (nn.Linear(64, 32, bias=False) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) + self.second(x)

    model, spy = Twins(), Spy(ErrorMoment)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    weights = [model.first.weight.detach().clone(), model.second.weight.detach().clone()]
    quantized(model, config(), spy, [x])
    for task, weight in zip(spy.tasks, weights, strict=True):
        torch.testing.assert_close(task.statistic(OutputMoment).matrix(), weight @ x.t() @ x, rtol=1e-4, atol=1e-4)
