"""A packed layer holds the tensors of a checkpoint, and computes as the quantized layer did."""

import math

import pytest
import torch
from torch import nn

from quark.config.layer import QLayerConfig
from quark.errors import CheckpointError
from quark.models.layers import QuantLinear
from quark.models.layers.layers_from_codes import until_used
from quark.models.layers.packed_layers import PackedLayer
from quark.models.layers.packed_weight import FormatPacking, PackedWeight
from quark.torch import LLMTemplate

SCHEMES = ["int4_wo_32", "uint4_wo_per_channel", "int8", "fp8", "ptpc_fp8", "mxfp4"]


def config_of(scheme: str) -> QLayerConfig:
    return LLMTemplate.get("llama").get_config(scheme=scheme).global_quant_config


def rounded(linear: nn.Linear, config: QLayerConfig) -> QuantLinear:
    """Return the quantized layer, whose static input scale was calibrated on ones."""
    made = QuantLinear.from_float(linear, config)
    weights, inputs = made.weight_quantizer, made.input_quantizer
    assert weights is not None
    qparams = weights.quantizer.find_qparams(linear.weight.detach())
    weights.set_qparams(qparams)
    made.weight = nn.Parameter(weights.quantizer.fake_quantize(linear.weight.detach(), qparams), requires_grad=False)
    if inputs is not None and not inputs.quantizer.is_dynamic:
        inputs.set_qparams(inputs.quantizer.find_qparams(torch.ones(1, linear.in_features)))
    return made


def filled(packed: PackedLayer, layer: QuantLinear) -> PackedLayer:
    """Return ``packed`` filled as by a loader: with real tensors in place of the meta ones."""
    for slot, owner in (("weight", layer.weight_quantizer), ("input", layer.input_quantizer)):
        scales = getattr(packed, f"{slot}_quantizer", None)
        if owner is None or owner.qparams is None or scales is None:
            continue
        if slot == "weight":
            tensors = owner.quantizer.pack(owner.quantizer.quantize(layer.weight.detach(), owner.qparams), owner.qparams, order="reorder")
            packed.weight = nn.Parameter(tensors.pop(""), requires_grad=False)
        else:
            tensors = owner.quantizer.pack_qparams(owner.qparams, order="reorder")
        for suffix, tensor in tensors.items():
            old = scales._buffers[suffix]
            assert (tensor.shape, tensor.dtype) == (old.shape, old.dtype), suffix
            scales._buffers[suffix] = tensor
    if layer.bias is not None:
        packed.bias = layer.bias
    return packed


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 32)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_forward_of_what_it_becomes_is_the_quantized_layers(scheme: str, linear: nn.Linear) -> None:
    layer = rounded(linear, config_of(scheme))
    packed = filled(PackedLayer(linear, config_of(scheme), "reorder"), layer)
    x = torch.randn(3, 64)
    with torch.no_grad():
        for made in (packed.unpack(), packed.from_codes(), until_used(packed.from_codes())):
            assert torch.equal(made(x), layer(x))
            assert torch.equal(made(x), layer(x)), "and so are the next"


@pytest.mark.parametrize("scheme", [*SCHEMES, "amdfp4", "bfp16"])
def test_weights_that_rounding_takes_beyond_float16_are_finite_after_reload(scheme: str, linear: nn.Linear) -> None:
    with torch.no_grad():
        linear.weight.mul_(1e4)[3, 5] = -65_504.0
    linear.half()
    layer = rounded(linear, config_of(scheme))
    packed = filled(PackedLayer(linear, config_of(scheme), "reorder"), layer).unpack()
    assert torch.isfinite(packed.weight).all()
    assert torch.equal(packed.weight, layer.weight)


@pytest.mark.parametrize("scheme", [*SCHEMES, "nvfp4", "int4_fp8", "amdfp4_global16"])
@pytest.mark.parametrize("which", [0, -1])
def test_every_scale_of_a_packed_weight_has_to_be_valid(scheme: str, which: int, linear: nn.Linear) -> None:
    """The test changes the first and the last value of each level; a 0 causes only a warning."""
    made = QuantLinear.from_float(linear, config_of(scheme))
    assert made.weight_quantizer is not None
    quantizer, weight = made.weight_quantizer.quantizer, linear.weight.detach()
    qparams = quantizer.find_qparams(weight)
    packing = FormatPacking(quantizer, "reorder", lambda codes: codes)
    tensors = packing.pack(quantizer.quantize(weight, qparams), qparams)

    def packed(changed: dict[str, torch.Tensor]) -> PackedWeight:
        return PackedWeight(packing, tensors | changed, tuple(weight.shape), weight.dtype)

    packed({}).check()
    scales = [name for name in tensors if name.startswith("scale")]
    assert len(scales) == len(quantizer.levels)
    for name in scales:
        values = [0xFF] if tensors[name].dtype is torch.uint8 else [-1.0, math.nan]  # 0xFF is NaN of E8M0, which has no sign
        for value in values:
            damaged = tensors[name].clone()
            damaged.reshape(-1)[which] = value
            with pytest.raises(CheckpointError, match="scale"):
                packed({name: damaged}).check()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_everything_is_on_the_meta_device_until_it_is_loaded(scheme: str, linear: nn.Linear) -> None:
    state = PackedLayer(linear, config_of(scheme), "reorder").state_dict()
    assert {t.device.type for t in state.values()} == {"meta"}
    assert {"weight", "bias", "weight_quantizer.scale"} <= set(state)


def test_the_float_weights_are_not_kept(linear: nn.Linear) -> None:
    packed = PackedLayer(linear, config_of("int4_wo_32"), "reorder")
    assert packed._float[0].weight.is_meta
    assert not linear.weight.is_meta, "the layer that was given is left alone"


def test_dynamic_activations_store_nothing(linear: nn.Linear) -> None:
    assert not any("input" in name for name in PackedLayer(linear, config_of("ptpc_fp8"), "reorder").state_dict())
