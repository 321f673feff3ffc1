"""Models of convolutions: equal to a plain simulation once they are quantized, exported and read back.

Algorithms leave them out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.errors import ConfigError
from quark.models.layers import QuantConv2d, QuantEmbedding, counts_as
from quark.models.plan.plan_text import plan_lines
from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.quantization import (
    AWQConfig,
    FP8E4M3PerTensorSpec,
    GPTQConfig,
    Int4PerGroupSpec,
    Int8PerChannelSpec,
    Int8PerTensorSpec,
    OCP_MXFP4Spec,
)

INT8 = Int8PerTensorSpec()
ROWS = Int8PerChannelSpec(ch_axis=0, symmetric=True)
FP8 = FP8E4M3PerTensorSpec()
DATA = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))


class Picture(nn.Module):
    """Convolutions of all kinds of groups, a transposed one, one of one dimension, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 16, 3, padding=1, padding_mode="reflect")
        self.depthwise = nn.Conv2d(16, 16, 3, groups=16, stride=2)
        self.up = nn.ConvTranspose2d(16, 8, 3, groups=2, stride=2)
        self.line = nn.Conv1d(8, 4, 3)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.depthwise(torch.relu(self.first(x))))
        y: Tensor = self.head(self.line(self.up(x).flatten(2)).mean(-1))
        return y


def quantized(layer: QLayerConfig, **more: object) -> nn.Module:
    config = QConfig(layer, layer_type_quant_config={nn.Conv1d: layer}, **more)
    return ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(Picture(), DataLoader(DATA, batch_size=2)))


def int8(x: Tensor, scale: Tensor) -> Tensor:
    return (x * (1 / scale)).round().clamp(-128, 127) * scale  # by the reciprocal: -127.5 steps are a tie


def fp8(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def simulated(round_weight: Callable[[nn.Module], Tensor], round_input: Callable[[Tensor, Tensor], Tensor], reach: float) -> Tensor:
    """The output of `Picture` with rounded weights and inputs.

    Scales are those of the largest inputs in the float model.
    """
    model, scale_of = Picture(), {}
    for layer in model.children():
        layer.register_forward_pre_hook(lambda layer, args: scale_of.update({layer: args[0].abs().max() / reach}))
    model(DATA)

    def passed(layer: nn.Module, x: Tensor) -> Tensor:
        rounded = round_input(x, scale_of[layer])
        weight, bias = round_weight(layer), layer.bias
        if layer is model.first:
            return functional.conv2d(functional.pad(rounded, (1, 1, 1, 1), "reflect"), weight, bias)
        if layer is model.depthwise:
            return functional.conv2d(rounded, weight, bias, stride=2, groups=16)
        if layer is model.up:
            return functional.conv_transpose2d(rounded, weight, bias, stride=2, groups=2)
        return functional.conv1d(rounded, weight, bias) if layer is model.line else functional.linear(rounded, weight, bias)

    x = torch.relu(passed(model.depthwise, torch.relu(passed(model.first, DATA))))
    return passed(model.head, passed(model.line, passed(model.up, x).flatten(2)).mean(-1))


def int8_weight_per_output(layer: nn.Module) -> Tensor:
    weight = layer.weight.detach()
    if not isinstance(layer, nn.ConvTranspose2d):
        largest = weight.flatten(1).abs().amax(1)
        return int8(weight, (largest / 127.5).view(-1, *[1] * (weight.ndim - 1)))
    rounded = weight.clone()
    for group in range(layer.groups):
        inputs = slice(group * 8, group * 8 + 8)  # which feed the outputs 4·group to 4·group + 3, on axis 1
        for output in range(4):
            kernel = weight[inputs, output]
            rounded[inputs, output] = int8(kernel, kernel.abs().max() / 127.5)
    return rounded


def fp8_weight(layer: nn.Module) -> Tensor:
    weight = layer.weight.detach()
    return fp8(weight, weight.abs().max() / 448)


@torch.no_grad()
@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (QLayerConfig(weight=ROWS, input_tensors=INT8), lambda: simulated(int8_weight_per_output, int8, 127.5)),
        (QLayerConfig(weight=FP8, input_tensors=FP8), lambda: simulated(fp8_weight, fp8, 448.0)),
    ],
    ids=["int8", "fp8"],
)
def test_a_model_of_convolutions_computes_what_a_plain_simulation_does(
    layer: QLayerConfig, expected: Callable[[], Tensor], tmp_path: Path
) -> None:
    model = quantized(layer)
    y, wanted = model(DATA), expected()
    assert float((y - wanted).norm() / wanted.norm()) < 1e-5
    assert float((y - Picture()(DATA)).norm() / wanted.norm()) > 1e-3
    export_safetensors(model, tmp_path / "out")
    assert torch.equal(import_model_from_safetensors(Picture(), tmp_path / "out", device="cpu")(DATA), y)


@torch.no_grad()
@pytest.mark.parametrize(
    "weight", [Int4PerGroupSpec(ch_axis=-1, group_size=16), OCP_MXFP4Spec(ch_axis=1, is_dynamic=False)], ids=["int4", "mxfp4"]
)
def test_groups_run_along_the_input_channels_of_each_kernel_position(weight: object, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer, x = nn.Conv2d(32, 6, 3), torch.randn(2, 32, 5, 5)
    size = weight.group_size if isinstance(weight, Int4PerGroupSpec) else 32
    plain = nn.Linear(size, 6 * 9 * 32 // size, bias=False)
    plain.weight.copy_(layer.weight.movedim(1, -1).reshape(-1, size))
    expected = ModelQuantizer(QConfig(QLayerConfig(weight=weight))).quantize_model(nn.Sequential(plain))[0].weight
    model = ModelQuantizer(QConfig(QLayerConfig(weight=weight))).quantize_model(nn.Sequential(layer))
    assert torch.equal(model[0].weight, expected.view(6, 3, 3, 32).movedim(-1, 1))
    export_safetensors(model, tmp_path / "out")
    back = import_model_from_safetensors(nn.Sequential(nn.Conv2d(32, 6, 3)), tmp_path / "out", device="cpu")
    assert torch.equal(back(x), model(x))


def test_other_axes_and_groups_that_do_not_divide_are_refused_before_any_change() -> None:
    columns = QConfig(QLayerConfig(weight=Int8PerChannelSpec(ch_axis=1, symmetric=True)), exclude=["head"])
    with pytest.raises(ConfigError, match=r"has scales per input channel.*output channels on axis 0, also if.*use ch_axis=0"):
        ModelQuantizer(columns).plan(Picture())
    groups = QConfig(QLayerConfig(weight=Int4PerGroupSpec(ch_axis=-1, group_size=32)), exclude=["head"])
    with pytest.raises(ConfigError, match=r"has 27 elements along its last axis, which groups of 32 do not divide.*: first"):
        ModelQuantizer(groups).plan(Picture())


def test_the_plan_says_types_groups_and_what_the_axes_mean() -> None:
    model = nn.ModuleDict({"picture": Picture(), "embed": nn.Embedding(8, 4)})
    both = QConfig(QLayerConfig(weight=ROWS), layer_type_quant_config={nn.Embedding: QLayerConfig(weight=ROWS, input_tensors=INT8)})
    lines = "\n".join(" ".join(line.split()) for line in plan_lines(ModelQuantizer(both).plan(model)))
    assert "picture.up conv_transpose2d 8×8×3×3 in 2 groups W int8/channel 0 (global)" in lines
    assert "picture.line conv1d 4×8×3 float (Conv1d stays float unless named)" in lines
    assert "embed embedding 8×4 W int8/channel 0 (type: Embedding)" in lines
    assert "3 convolution(s) are quantized: " in lines
    assert "Axis 0 of their weights is the output channels, also in transposed convolutions" in lines
    assert "1 embedding(s) are quantized: embed. Axis 0 of their weights is the token, and their inputs are indices" in lines


def test_gptq_leaves_convolutions_to_rounding_to_nearest_and_says_so() -> None:
    weight = QLayerConfig(weight=Int4PerGroupSpec(ch_axis=-1, group_size=2))
    gptq = GPTQConfig(inside_layer_modules=["depthwise", "up", "head"], model_decoder_layers="")
    config = QConfig(weight, algo_config=[gptq], exclude=["first", "depthwise"])
    plan = ModelQuantizer(config).plan(Picture())
    assert {row.name: row.algorithm for row in plan.quantized} == {"up": None, "head": "gptq"}
    assert any("'gptq' rounds linear layers; 1 conv_transpose2d layer(s) (up) are rounded to nearest" in note for note in plan.notes)
    config.exclude = [*config.exclude, "head"]
    with pytest.raises(ConfigError, match=r"\(the algorithm rounds linear layers, but these names match 1 conv_transpose2d"):
        ModelQuantizer(config).plan(Picture())
    config.algo_config = [AWQConfig(scaling_layers=[], model_decoder_layers="")]
    with pytest.raises(ConfigError, match="facts about the model's family"):
        ModelQuantizer(config).plan(Picture())


def test_tied_layers_that_are_quantized_get_weights_of_their_own_and_the_plan_says_so() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embed"].weight
    layer = QLayerConfig(weight=ROWS)
    by_type = {nn.Embedding: layer}
    notes = {
        "head": ModelQuantizer(QConfig(layer)).plan(model).notes,
        "both": ModelQuantizer(QConfig(layer, layer_type_quant_config=by_type)).plan(model).notes,
        "embed": ModelQuantizer(QConfig(layer, layer_type_quant_config=by_type, exclude=["head"])).plan(model).notes,
    }
    assert any("it gets its own weight, 'embed' stays float" in note for note in notes["head"])
    assert any("both will be quantized: each gets its own codes" in note for note in notes["both"])
    assert any("'embed' will be quantized, but 'head', which shares its weight, stays float" in note for note in notes["embed"])
    done = ModelQuantizer(QConfig(layer, layer_type_quant_config=by_type, exclude=["head"])).quantize_model(model)
    assert done["head"].weight is not done["embed"].weight


class Renamed(nn.Conv2d):
    """Nothing but another constructor."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, 1)


class Padded(nn.Conv2d):
    """Pads in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional.pad(x, (1, 1)))


class Scaled(nn.Embedding):
    """Multiplies the rows by a constant, which a quantized layer does too."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Shifted(nn.Embedding):
    """Computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 1 + super().forward(x)


def test_subclasses_that_override_nothing_are_quantized_as_their_base_is() -> None:
    assert counts_as(Renamed(4)) is nn.Conv2d
    assert counts_as(Padded(4, 4, 1)) is None
    assert counts_as(Scaled(4, 4)) is nn.Embedding
    assert counts_as(Shifted(4, 4)) is None
    assert counts_as(nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1))) is None
    model = ModelQuantizer(QConfig(QLayerConfig(weight=ROWS))).quantize_model(nn.Sequential(Renamed(4)))
    assert type(model[0]) is QuantConv2d


def test_the_output_of_an_embedding_is_quantized_where_it_is_asked_for() -> None:
    torch.manual_seed(0)
    layer, ids = QLayerConfig(weight=ROWS, input_tensors=INT8, output_tensors=INT8), torch.arange(8)
    config = QConfig(QLayerConfig(), layer_type_quant_config={nn.Embedding: layer})
    model = nn.Sequential(nn.Embedding(8, 4))
    float_weight = model[0].weight.detach().clone()
    embedding = ModelQuantizer(config).quantize_model(model, [ids])[0]
    assert isinstance(embedding, QuantEmbedding)
    assert embedding.input_quantizer is None
    assert embedding.output_quantizer is not None
    assert torch.equal(model(ids), int8(embedding.weight, float_weight.abs().max() / 127.5))


@pytest.mark.parametrize("method", ["percentile", "MSE", "histogram", "histogrampro"])
def test_activations_of_convolutions_are_calibrated_by_observers_that_see_batches_one_by_one(method: str) -> None:
    spec = Int8PerTensorSpec(observer_method=method, symmetric=True)
    model = quantized(QLayerConfig(weight=ROWS, input_tensors=spec, output_tensors=spec))
    seen: list[Tensor] = []
    floats = Picture()
    floats.up.register_forward_hook(lambda layer, args, y: seen.extend([args[0], y]))
    with torch.no_grad():
        floats(DATA)
    # The counts of a histogram are those of all data at once, whatever the batches; a bin is at most 1/4096
    # of the range.
    for x, module in zip(seen, (model.up.input_quantizer, model.up.output_quantizer), strict=True):
        torch.testing.assert_close(module.scale, module.quantizer.find_qparams(x).scale, rtol=1 / 4096, atol=0)
