"""Linear layers under other class names: those that are recognized, and those with the input axis first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.phimoe.configuration_phimoe import PhimoeConfig
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter
from transformers.pytorch_utils import Conv1D

from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.models.layers import QuantConv1D, QuantLinear, counts_as, linear_weight, quantized_class
from quark.models.layers.packed_layers import PackedLayer
from quark.models.plan.quant_plan import make_plan
from quark.models.plan.rules import layer_config_for
from quark.plugins import LayerTypeRecord, documented_object, layer_types

INT4 = documented_object("Int4PerGroupSpec")(group_size=32, ch_axis=-1, is_dynamic=False).to_quantization_spec()
FP8 = documented_object("FP8E4M3PerChannelSpec")(ch_axis=0, is_dynamic=False).to_quantization_spec()


class Renamed(nn.Linear):
    """A linear layer under another name."""


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class WithoutItsBias(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


class Grouped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("gi,oi->go", x.flatten(0, -2), self.weight)


class Adapted(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.adapter = nn.Linear(*sizes)


class WithScale(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.scale = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize("kind", [Renamed, FalconLinear])
@pytest.mark.parametrize("bias", [True, False])
def test_a_subclass_that_computes_the_same_is_quantized_like_a_linear_layer(kind: type[nn.Linear], bias: bool) -> None:
    layer = kind(32, 16, bias=bias)
    assert counts_as(layer) is nn.Linear
    assert quantized_class(layer) is QuantLinear
    made = QuantLinear.from_float(layer, QLayerConfig(weight=INT4))
    x = torch.randn(2, 3, 32)
    assert (made(x) - layer(x)).abs().max() < 1e-5
    with torch.device("meta"):
        assert counts_as(kind(32, 16, bias=bias)) is nn.Linear, "known without data"


@pytest.mark.parametrize("kind", [Scaled, WithoutItsBias, Grouped, Adapted, WithScale])
def test_a_subclass_that_computes_or_holds_something_else_is_not(kind: type[nn.Linear]) -> None:
    assert counts_as(kind(4, 4)) is None


def test_routers_and_layers_whose_owner_goes_past_their_forward_are_not() -> None:
    attention = nn.MultiheadAttention(8, 2)
    assert isinstance(attention.out_proj, nn.Linear)
    assert counts_as(attention.out_proj) is None
    assert counts_as(PhimoeTopKRouter(PhimoeConfig(hidden_size=32, num_local_experts=4))) is None


def test_trying_a_forward_leaves_the_layer_and_the_random_state_alone() -> None:
    layer = FalconLinear(32, 16)
    weight, state = layer.weight, torch.get_rng_state()
    counts_as(layer)
    assert layer.weight is weight
    assert (layer.in_features, layer.out_features) == (32, 16)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_class_of_ones_own_is_quantized_as_long_as_it_is_registered() -> None:
    assert counts_as(Scaled(4, 4)) is None
    layer_types().register(
        LayerTypeRecord(name="scaled", layer=f"{__name__}:Scaled", quantized="quark.models.layers.quantized_layers:QuantLinear")
    )
    try:
        assert counts_as(Scaled(4, 4)) is Scaled
    finally:
        layer_types().unregister("scaled")
    assert counts_as(Scaled(4, 4)) is None


def conv1d(inputs: int = 64, outputs: int = 16) -> Conv1D:
    torch.manual_seed(0)
    layer = Conv1D(outputs, inputs)
    nn.init.normal_(layer.bias)
    return layer


def test_a_layer_that_lies_input_first_becomes_a_linear_one_that_computes_the_same() -> None:
    layer = conv1d()
    made = quantized_class(layer).from_float(layer, QLayerConfig(weight=INT4))
    assert type(made) is QuantConv1D
    assert (made.in_features, made.out_features, made.weight.shape) == (64, 16, (16, 64))
    assert made.weight.data_ptr() == layer.weight.data_ptr()
    x = torch.randn(2, 3, 64)
    assert (made(x) - layer(x)).abs().max() < 1e-5
    assert layer.weight.shape == (64, 16), "the float layer stays as it is"


def test_its_groups_run_along_the_inputs() -> None:
    layer = conv1d(inputs=64, outputs=16)  # 16 outputs hold no group of 32
    made = QuantConv1D.from_float(layer, QLayerConfig(weight=INT4))
    assert made.weight_quantizer is not None
    values, qparams = made.weight_quantizer.quantizer.round_to_nearest(made.weight.data)
    linear = nn.Linear(64, 16)
    linear.weight = nn.Parameter(layer.weight.detach().t().contiguous())
    plain = QuantLinear.from_float(linear, QLayerConfig(weight=INT4))
    assert plain.weight_quantizer is not None
    expected, expected_qparams = plain.weight_quantizer.quantizer.round_to_nearest(linear.weight.data)
    assert torch.equal(values, expected)
    assert torch.equal(qparams.scale, expected_qparams.scale)


def test_plans_name_it_linear_and_give_its_shape_as_one() -> None:
    model = nn.Sequential(conv1d(), FalconLinear(16, 4), Scaled(4, 4))
    plan = make_plan(model, QConfig(global_quant_config=QLayerConfig(weight=FP8), layer_quant_config={"0": QLayerConfig(weight=INT4)}))
    assert [(row.name, row.layer_type, row.shape) for row in plan.rows] == [("0", "linear", (16, 64)), ("1", "linear", (4, 16))]


def test_the_linear_type_of_a_configuration_reaches_both() -> None:
    layer = QLayerConfig(weight=FP8)
    config = QConfig(global_quant_config=QLayerConfig(), layer_type_quant_config={nn.Linear: layer})
    for module in (conv1d(), FalconLinear(4, 4)):
        kind = counts_as(module)
        assert kind is not None
        assert layer_config_for(config, "x", kind).config == layer


def test_its_state_lies_input_first_and_loads_from_there() -> None:
    layer = conv1d()
    made = QuantConv1D.from_float(layer, QLayerConfig(weight=INT4))
    assert torch.equal(made.state_dict()["weight"], layer.weight)
    other = QuantConv1D.from_float(conv1d(), QLayerConfig(weight=INT4))
    other.load_state_dict({"weight": layer.weight + 1, "bias": layer.bias})
    assert torch.equal(linear_weight(layer) + 1, other.weight)


@pytest.mark.parametrize("spec", [INT4, FP8, None], ids=["int4", "fp8", "float"])
def test_packed_it_lies_input_first_and_its_scales_as_those_of_a_linear_layer(spec: Any) -> None:
    layer = conv1d()
    config = QLayerConfig(weight=spec)
    packed = PackedLayer(layer, config, "reorder")
    linear = PackedLayer(nn.Linear(64, 16), config, "reorder")
    assert packed.weight.shape == linear.weight.t().shape
    made = quantized_class(layer).from_float(layer, config)
    expected = made.weight.data
    packed._parameters["bias"] = layer.bias
    if made.weight_quantizer is None:
        packed._parameters["weight"] = layer.weight
    else:
        assert packed.weight_quantizer.scale.shape == linear.weight_quantizer.scale.shape
        quantizer = made.weight_quantizer.quantizer
        expected, qparams = quantizer.round_to_nearest(expected)
        stored = quantizer.pack(quantizer.quantize(expected, qparams), qparams)
        packed._parameters["weight"] = stored.pop("").t()
        packed.weight_quantizer._buffers.update(stored)
    assert torch.equal(packed.unpack().weight, expected)
