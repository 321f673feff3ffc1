"""A model that is itself one layer: it is wrapped for a run, and becomes the layer that replaced it."""

from __future__ import annotations

from torch import nn

from quark.models.plan.one_layer import OneLayer, as_model, put_back


def test_a_layer_is_wrapped_and_a_model_is_not() -> None:
    layer, model = nn.Linear(2, 3), nn.Sequential(nn.Linear(2, 3))
    whole = as_model(layer)
    assert isinstance(whole, OneLayer)
    assert whole.layer is layer
    assert as_model(model) is model


def test_a_layer_becomes_what_replaced_it_with_the_results_of_the_run() -> None:
    layer = nn.Linear(2, 3)
    whole = as_model(layer)
    replacement = nn.Conv1d(1, 1, 1)
    whole.layer = replacement
    whole.quark_plan = "plan"  # type: ignore[assignment]
    put_back(whole, layer)
    assert type(layer) is nn.Conv1d
    assert layer.weight is replacement.weight
    assert layer.quark_plan == "plan"
    before = dict(layer.__dict__)
    put_back(layer, layer)
    assert layer.__dict__ == before
