"""A block that was written is read back as it was, scales of activations for each channel among them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from quark.checkpoint import ExportOptions, export_safetensors
from quark.checkpoint.content import content_of
from quark.checkpoint.model_tensors import Region
from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.models.layers import QuantizedLayer
from quark.torch import ModelQuantizer
from quark.torch.quantization import Int8PerChannelSpec
from quark_exporters.quark_layout.layout import SafetensorsExporter

ROWS = Int8PerChannelSpec(ch_axis=0, symmetric=True)
CHANNELS = Int8PerChannelSpec(ch_axis=1, symmetric=True, is_dynamic=False)
LAYERS = {
    "convolution": nn.Conv2d(3, 8, 3),
    "in groups": nn.Conv2d(4, 8, 3, groups=2),
    "transposed": nn.ConvTranspose2d(6, 4, 3, groups=2),
    "linear": nn.Linear(6, 4),
}


class Written(dict[str, Tensor]):
    def read(self, name: str) -> Tensor:
        return self[name]

    def names_under(self, module: str) -> list[str]:
        return [name.rpartition(".")[2] for name in self if name.rpartition(".")[0] == module]


def quantized(layer: nn.Module, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(type(layer)(**arguments_of(layer)))
    channels = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
    sample = torch.randn(2, channels, *(() if isinstance(layer, nn.Linear) else (7, 7))) * torch.arange(1.0, channels + 1).reshape(
        1, -1, *(() if isinstance(layer, nn.Linear) else (1, 1))
    )
    config = QConfig(QLayerConfig(weight=ROWS, input_tensors=CHANNELS, output_tensors=CHANNELS))
    return ModelQuantizer(config).quantize_model(model, [sample])


def arguments_of(layer: nn.Module) -> dict[str, object]:
    if isinstance(layer, nn.Linear):
        return {"in_features": layer.in_features, "out_features": layer.out_features}
    names = ("in_channels", "out_channels", "kernel_size", "groups")
    return {name: getattr(layer, name) for name in names}


@pytest.mark.parametrize("kind", LAYERS)
def test_scales_for_each_channel_of_activations_come_back(kind: str, tmp_path: Path) -> None:
    first, second = (quantized(LAYERS[kind], seed) for seed in (0, 1))
    export_safetensors(first, tmp_path)
    options, content = ExportOptions(), content_of(second)
    for layer in (module for module in second.modules() if isinstance(module, QuantizedLayer)):
        for quantizer in (layer.weight_quantizer, layer.input_quantizer, layer.output_quantizer):
            assert quantizer is not None
            quantizer.scale = quantizer.zero_point = None
    SafetensorsExporter().read(second, content.plan, options, Region(), Written(load_file(tmp_path / "model.safetensors")))
    expected, state = first.state_dict(), second.state_dict()
    assert expected.keys() == state.keys()
    assert expected["0.input_quantizer.scale"].numel() > 1
    assert all(torch.equal(tensor, state[name]) for name, tensor in expected.items())
