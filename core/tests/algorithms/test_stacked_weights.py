"""Stacked weights: rounding the stack to nearest gives the same weights as rounding layer by layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import quark
from quark.algorithms import RoundingTask, RoundToNearest
from quark.config.layer import QLayerConfig
from quark.models.layers import QuantizedLayer, quantized_class

ROWS = (6, 10)
SCHEMES = ["int4_wo_32", "int4_wo_per_channel", "int8", "fp8", "mxfp4", "nvfp4"]


def layers(scheme: str) -> dict[str, QuantizedLayer]:
    """Return two layers with one spec; every call returns the same weights."""
    config: QLayerConfig = quark.schemes().load_config(scheme)()
    torch.manual_seed(0)
    return {f"layer{rows}": quantized_class(m).from_float(m, config) for rows in ROWS for m in [nn.Linear(64, rows, bias=False)]}


@pytest.mark.parametrize(("scheme", "shares_scale"), [(s, False) for s in SCHEMES] + [(s, True) for s in ("int8", "fp8", "nvfp4")])
def test_nearest_values_of_the_stack_are_those_of_each_layer(scheme: str, shares_scale: bool) -> None:
    stacked, alone = (RoundingTask(layers(scheme), shares_scale=shares_scale) for _ in range(2))
    weights = stacked.stacked()
    grid = weights.grid()
    scales = grid.fixed or grid.scales(weights.wt)
    weights.keep(grid, grid.round_(weights.wt, grid.with_subscales(weights.wt, scales)), scales)
    RoundToNearest().round(alone)
    for name, layer in alone.layers.items():
        assert torch.equal(stacked.layers[name].weight, layer.weight)  # type: ignore[arg-type]
        assert layer.weight_quantizer is not None
        assert stacked.layers[name].weight_quantizer is not None
        one, other = (each.weight_quantizer.qparams for each in (stacked.layers[name], layer))  # type: ignore[union-attr]
        assert torch.equal(one.scale, other.scale)  # type: ignore[union-attr]
        assert not any(each.weight.requires_grad for each in (stacked.layers[name], layer)), "values on a grid are not trained"


def test_a_scale_that_spans_the_tensor_is_that_of_the_weight_as_it_was_changed() -> None:
    weights = RoundingTask(layers("int8")).stacked()
    before = weights.grid().fixed
    weights.wt *= 2
    after = weights.grid().fixed
    assert before is not None
    assert after is not None
    assert torch.equal(after.scale, 2 * before.scale)


def test_values_of_rows_are_given_to_the_layers_they_belong_to() -> None:
    parts = RoundingTask(layers("int8")).stacked().by_layer(torch.arange(16.0))
    assert {name: part.tolist() for name, part in parts.items()} == {"layer6": [*range(6)], "layer10": [*range(6, 16)]}
