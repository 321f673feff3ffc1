"""A plan names the layers that look like known layers but stay float, and warns if nothing is quantized."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.torch import ModelQuantizer
from quark_tiny_model import tiny_template

CONFIG = QConfig(global_quant_config=tiny_template().get_config("int8_wo_per_channel").global_quant_config)


class Doubled(nn.Linear):
    """Not a linear layer of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Double(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_layers_of_a_derived_class_that_stay_float_are_named_by_class() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Doubled(4, 4), Doubled(4, 4))
    plan = ModelQuantizer(CONFIG).plan(model)
    assert [row.name for row in plan.quantized] == ["0"]
    (note,) = (note for note in plan.notes if "stay float" in note)
    assert note.startswith("2 layer(s) of the class Doubled stay float, because they compute something else than Linear: {1-2}.")
    assert not plan.warnings


def test_a_model_that_stays_float_is_warned_of() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    parametrize.register_parametrization(model[0], "weight", Double())
    plan = ModelQuantizer(CONFIG).plan(model)
    assert plan.warnings == ("this model stays float, because it has no layer of a class that is quantized by default",)
    assert any("ParametrizedLinear" in note for note in plan.notes)


def test_a_float_configuration_is_not_warned_of() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    assert not ModelQuantizer(QConfig(global_quant_config=QLayerConfig())).plan(model).warnings
    with torch.device("meta"):
        meta = nn.Sequential(nn.Linear(4, 4))
    assert not ModelQuantizer(CONFIG).plan(meta).warnings
