"""Observed ranges: all experts share one for a projection's input, if the configuration asks for it."""

import pytest
import torch
from torch import Tensor, nn

from quark.config.layer import QLayerConfig
from quark.config.model import QConfig
from quark.errors import CalibrationError, ConfigError
from quark.plugins import schemes
from quark.torch import ModelQuantizer


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(32, 32)
        self.down_proj = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.up_proj(x).relu())


class Mixture(nn.Module):
    """Routes by the sign of the first feature; the last expert gets nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 32)
        self.experts = nn.ModuleList([Expert(), Expert(), Expert()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.gate(x)
        chosen = (x[:, 0] > 0).long()
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            if (chosen == i).any():
                out[chosen == i] = expert(x[chosen == i])
        return out


def quantized(scheme: str, *, sync: bool) -> nn.Module:
    torch.manual_seed(0)
    layer: QLayerConfig = schemes().load_config(scheme)()
    config = QConfig(global_quant_config=layer, sync_moe_expert_input_amax=sync)
    return ModelQuantizer(config).quantize_model(Mixture(), [torch.randn(40, 32)])


def input_scales(model: nn.Module, projection: str) -> list[Tensor]:
    return [expert.get_submodule(projection).input_quantizer.scale for expert in model.experts]  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8"])
def test_experts_share_the_range_of_their_inputs_and_one_without_tokens_gets_it_too(scheme: str) -> None:
    model = quantized(scheme, sync=True)
    for projection in ("up_proj", "down_proj"):
        first, *others = input_scales(model, projection)
        assert all(torch.equal(first, other) for other in others)
    assert not torch.equal(input_scales(model, "up_proj")[0], input_scales(model, "down_proj")[0]), "each projection has its own range"
    assert model.gate.input_quantizer.scale > 0  # type: ignore[union-attr, operator]


def test_without_it_experts_keep_their_own_ranges_and_one_without_tokens_has_its_siblings(caplog: pytest.LogCaptureFixture) -> None:
    model = quantized("fp8", sync=False)
    first, second, idle = input_scales(model, "up_proj")
    assert not torch.equal(first, second)
    assert torch.equal(idle, torch.maximum(first, second))
    assert any("reached 2 layer(s) of experts: experts.2.up_proj, experts.2.down_proj." in r.message for r in caplog.records)


@pytest.mark.parametrize("sync", [True, False])
def test_outputs_of_an_expert_without_tokens_have_the_range_of_its_siblings(sync: bool, caplog: pytest.LogCaptureFixture) -> None:
    layer: QLayerConfig = schemes().load_config("fp8")()
    layer.output_tensors = layer.input_tensors
    torch.manual_seed(0)
    config = QConfig(global_quant_config=layer, sync_moe_expert_input_amax=sync)
    model = ModelQuantizer(config).quantize_model(Mixture(), [torch.randn(40, 32)])
    for projection in ("up_proj", "down_proj"):
        first, second, idle = (e.get_submodule(projection).output_quantizer.scale for e in model.experts)  # type: ignore[union-attr, operator]
        assert not torch.equal(first, second), "outputs are not pooled"
        assert torch.equal(idle, torch.maximum(first, second))
    (line,) = [r.message for r in caplog.records if "reached 2 layer(s) of experts: experts.2.up_proj, experts.2.down_proj." in r.message]
    assert "Their scales come from the ranges of the other experts" in line


def test_where_no_expert_is_reached_the_range_would_be_made_up() -> None:
    class Idle(Mixture):
        def forward(self, x: Tensor) -> Tensor:
            return self.gate(x)

    layer: QLayerConfig = schemes().load_config("fp8")()
    with pytest.raises(CalibrationError, match=r"no calibration batch reached 'experts\.0\.up_proj'"):
        ModelQuantizer(QConfig(global_quant_config=layer)).quantize_model(Idle(), [torch.randn(4, 32)])


def test_experts_with_different_observers_cannot_share_a_range() -> None:
    layer: QLayerConfig = schemes().load_config("int8")()
    other = layer.copied()
    other.input_tensors.observer_cls = "PerTensorPercentileObserver"  # type: ignore[union-attr]
    config = QConfig(global_quant_config=layer, layer_quant_config={"*experts.1.*": other}, sync_moe_expert_input_amax=True)
    with pytest.raises(ConfigError, match="PerTensorMinMaxObserver and a PerTensorPercentileObserver cannot be merged"):
        ModelQuantizer(config).quantize_model(Mixture(), [torch.randn(40, 32)])
