"""Quantized and packed layers wrap the float layer's parameters, and give the float layer back."""

import pytest
import torch
from torch import nn

from quark.config.layer import QLayerConfig
from quark.errors import CalibrationError
from quark.models.layers import QuantizerModule, QuantLinear, is_quantized, quantized_class
from quark.models.layers.layers_from_codes import UntilUsed, until_used
from quark.models.layers.packed_layers import PackedLayer
from quark.plugins import documented_object, layer_types

INT8 = documented_object("Int8PerTensorSpec")().to_quantization_spec()
DYNAMIC = documented_object("FP8E4M3PerChannelSpec")(ch_axis=1, is_dynamic=True).to_quantization_spec()


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(16, 8)


def test_a_quantized_layer_keeps_parameters_settings_and_hooks() -> None:
    layer = linear().train(False)
    seen: list[int] = []
    layer.register_forward_hook(lambda *_: seen.append(1))
    made = QuantLinear.from_float(layer, QLayerConfig(weight=INT8, input_tensors=DYNAMIC))
    assert made.weight is layer.weight
    assert made.bias is layer.bias
    assert (made.in_features, made.out_features, made.training) == (16, 8, False)
    made(torch.randn(2, 16))
    assert seen == [1]
    assert is_quantized(made)
    assert not is_quantized(layer)


def test_making_one_does_not_change_the_float_layer() -> None:
    layer = linear()
    QuantLinear.from_float(layer, QLayerConfig(weight=INT8, bias=INT8))
    assert list(layer._modules) == []
    assert type(layer) is nn.Linear


def test_a_layer_without_a_bias_gets_no_bias_quantizer() -> None:
    made = QuantLinear.from_float(nn.Linear(4, 4, bias=False), QLayerConfig(weight=INT8, bias=INT8))
    assert made.bias_quantizer is None


def test_inputs_and_outputs_are_rounded_in_the_forward() -> None:
    layer = linear()
    made = QuantLinear.from_float(layer, QLayerConfig(input_tensors=DYNAMIC, output_tensors=DYNAMIC))
    x = torch.randn(3, 16)
    assert made.input_quantizer is not None
    assert made.output_quantizer is not None
    assert torch.equal(made(x), made.output_quantizer(layer(made.input_quantizer(x))))


def test_a_static_quantizer_without_scales_says_what_is_missing() -> None:
    with pytest.raises(CalibrationError, match="static int8 quantizer has no scales"):
        QuantizerModule(INT8, activation=True)(torch.ones(2))


def test_scales_are_buffers_that_move_with_the_model() -> None:
    module = QuantizerModule(INT8, activation=False)
    module.set_qparams(module.quantizer.find_qparams(torch.ones(4)))
    assert list(module.state_dict()) == ["scale"]
    assert module.to("meta").scale.is_meta


PLANNED = [record.name for record in layer_types() if record.quantized is not None and record.planned_as is None]


@pytest.mark.parametrize("kind", [layer_types().load_layer(name) for name in PLANNED], ids=lambda k: k.__name__)
def test_a_packed_layer_of_every_type_becomes_the_layer_that_was_packed(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    layer = kind(8, 16, 3, groups=2) if issubclass(kind, nn.modules.conv._ConvNd) else kind(8, 16)
    made = quantized_class(layer).from_float(layer, QLayerConfig(weight=INT8))
    assert made.weight_quantizer is not None
    values, qparams = made.weight_quantizer.quantizer.round_to_nearest(layer.weight.data)
    packed = PackedLayer(layer, made.layer_config, "reorder")
    codes = made.weight_quantizer.quantizer.quantize(values, qparams)
    stored = made.weight_quantizer.quantizer.pack(codes, qparams)
    assert (packed.weight.shape, packed.weight.dtype, packed.weight.is_meta) == (stored[""].shape, stored[""].dtype, True)
    packed._parameters["weight"] = nn.Parameter(stored.pop(""), requires_grad=False)
    for suffix, tensor in stored.items():
        packed.weight_quantizer._buffers[suffix] = tensor
    packed._parameters["bias"] = layer._parameters.get("bias")
    assert torch.equal(packed.unpack().weight, values)


def test_the_first_forward_unpacks_and_lets_the_codes_go() -> None:
    layer = linear()
    packed = PackedLayer(layer, QLayerConfig(weight=INT8), "reorder")
    packed._parameters["weight"] = nn.Parameter(torch.ones(8, 16, dtype=torch.int8), requires_grad=False)
    packed.weight_quantizer._buffers.update(scale=torch.tensor(0.5), zero_point=torch.tensor(0, dtype=torch.int8))
    packed._parameters["bias"] = nn.Parameter(torch.zeros(8))
    made, x = until_used(packed.from_codes()), torch.ones(1, 16)
    assert isinstance(made, UntilUsed)
    assert made(x).tolist() == [[8.0] * 8]
    assert type(made) is QuantLinear
    assert made(x).tolist() == [[8.0] * 8]
    assert {t.dtype for t in made.state_dict().values()} == {torch.float32}
    assert all(t.numel() == 1 for t in made.buffers()), "the codes are let go"
