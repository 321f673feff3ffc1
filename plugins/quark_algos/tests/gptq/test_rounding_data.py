"""Whatever calibration data look like: forms, lengths, padding; too few of them, or none that are numbers."""

from __future__ import annotations

import copy
from typing import Any

import attrs
import pytest
import torch
from torch import nn

import quark
from quark.algorithms import Hessian, RoundingTask, Statistic
from quark.config.algorithm import AlgoConfig
from quark.config.model import QConfig
from quark.errors import QuarkError
from quark.models.layers import quantized_class
from quark.torch import LLMTemplate, ModelQuantizer
from quark_algos.gptq.config import GPTAQConfig, GPTQConfig
from quark_algos.gptq.gptq import ColumnRounding

from ..runs import QRONOS, data, error, float_model, layers, off_grid, quantized, same, to_nearest


def test_dicts_and_tensors_give_the_same_model() -> None:
    dicts = [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in data()]
    assert same(quantized(GPTQConfig()), quantized(GPTQConfig(), batches=dicts))


def test_sequences_may_differ_in_length_and_padding_does_not_count() -> None:
    short, long = data()[0][:1, :50], data()[1][:1]
    filled = torch.cat([nn.functional.pad(short, (0, 78), value=7), long])
    mask = torch.ones_like(filled)
    mask[0, 50:] = 0
    apart = quantized(GPTQConfig(), batches=[short, long])
    padded = quantized(GPTQConfig(), batches=[{"input_ids": filled, "attention_mask": mask}])
    careless = quantized(GPTQConfig(), batches=[filled])
    counts = [{f["tokens"] for f in m.quark_report.layers.values()} for m in (apart, padded, careless)]
    assert counts == [{178}, {178}, {256}]
    first = "model.layers.0.self_attn.q_proj"
    expected, found, wrong = (layers(m)[first].weight for m in (apart, padded, careless))
    assert (found != expected).float().mean() < 0.01 < (wrong != expected).float().mean()


def test_fewer_tokens_than_channels_are_told_and_survived() -> None:
    for settings in (GPTQConfig(), GPTAQConfig(), QRONOS):
        model = quantized(settings, batches=[data()[0][:1, :40]])
        metrics = model.quark_report.layers.values()
        assert all(f["few_tokens"] and 0 < f["shrinkage"] < 1 and f["tokens"] == 40 for f in metrics)
        assert error(model) < error(to_nearest()), "of which nine in ten tokens were not seen"
        assert not off_grid(model)


def test_one_token_is_enough_to_get_through() -> None:
    model = quantized(GPTAQConfig(), "mxfp4", batches=[torch.tensor([[5]])])
    metrics = model.quark_report.layers.values()
    assert {f["tokens"] for f in metrics} == {1}
    assert max(f["dead"] for f in metrics) > 20, "of small inputs fp4 makes zeros"
    assert error(model) < 3 * error(to_nearest("mxfp4")), "channels that this token left out keep their weights"


def test_where_memory_is_short_blocks_are_passed_twice_and_it_is_nearly_as_good() -> None:
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_64")
    config.algo_config, config.activation_memory = [GPTAQConfig()], 0
    model = ModelQuantizer(config).quantize_model(copy.deepcopy(float_model()), data())
    assert any("runs twice" in note for note in model.quark_plan.notes)
    assert error(model) < 0.7 * error(to_nearest())


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 1e25])
def test_activations_that_overflow_are_refused(bad: float) -> None:
    config = QConfig(global_quant_config=quark.schemes().load_config("int4_wo_32")(), algo_config=[GPTQConfig()])
    with pytest.raises(QuarkError, match="NaN or Inf"):
        ModelQuantizer(config).quantize_model(nn.Sequential(nn.Linear(32, 8)), [torch.full((4, 32), bad)])


@pytest.mark.parametrize("settings", [GPTAQConfig(alpha=1.0), attrs.evolve(QRONOS, correction_share=1.0)], ids=lambda s: s.name)
def test_what_a_channel_that_is_silent_in_the_quantized_model_alone_would_give_is_made_up_for_by_others(settings: AlgoConfig) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(500, 32, generator=g)
    x[:, 3] = x[:, 4] + x[:, 5] + 0.1 * torch.randn(500, generator=g)
    seen = x.clone()
    seen[:, 3] = 0
    moments: dict[type[Statistic], Statistic] = {kind: kind(32, x.device) for kind in ColumnRounding(settings).needs}
    for hessian in moments.values():
        hessian.update(seen, x)
    torch.manual_seed(1)
    layer = nn.Linear(32, 64, bias=False)
    weight = layer.weight.detach().clone()
    made = quantized_class(layer).from_float(layer, quark.schemes().load_config("int8")())
    ColumnRounding(settings).round(RoundingTask({"layer": made}, moments))
    assert not made.weight[:, 3].any()
    lost = (x[:, 3:4] @ weight[:, 3:4].t()).square().mean()
    assert (x @ weight.t() - seen @ made.weight.detach().t()).square().mean() < 0.1 * lost


def test_inputs_whose_moment_cannot_be_factored_leave_the_layer_rounded_to_nearest_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def indefinite(self: Hessian) -> torch.Tensor:
        return -torch.ones(self.columns, self.columns) + 2 * torch.eye(self.columns)

    monkeypatch.setattr(Hessian, "matrix", indefinite)
    monkeypatch.setattr("quark_algos.gptq.damping.ATTEMPTS", 2)
    config = QConfig(global_quant_config=quark.schemes().load_config("int4_wo_32")(), algo_config=[GPTQConfig(preset="reference")])
    torch.manual_seed(0)
    float_layer = nn.Linear(32, 8)
    model: Any = ModelQuantizer(config).quantize_model(nn.Sequential(copy.deepcopy(float_layer)), [torch.randn(100, 32)])
    plain: Any = ModelQuantizer(attrs.evolve(config, algo_config=None)).quantize_model(nn.Sequential(float_layer))
    assert torch.equal(model[0].weight, plain[0].weight)
    assert "positive definite" in model.quark_report.layers["0"]["to_nearest_because"]
    assert any("1 of 1 layers are rounded to nearest" in line for line in model.quark_report.lines())


def test_few_tokens_do_no_harm_by_either_preset() -> None:
    x = torch.randn(140, 128, generator=torch.Generator().manual_seed(0))
    for settings in (GPTQConfig(), GPTQConfig(preset="reference")):
        config = QConfig(global_quant_config=quark.schemes().load_config("int4_wo_32")(), algo_config=[settings])
        torch.manual_seed(0)
        model: Any = ModelQuantizer(config).quantize_model(nn.Sequential(nn.Linear(128, 32)), [x])
        metrics = model.quark_report.layers["0"]
        assert (metrics["held_out_error"] > 1.1) == ("to_nearest_because" in metrics) == (settings.preset == "reference")
        said = any("because the algorithm has a larger error on held-out tokens" in line for line in model.quark_report.lines())
        assert said == (settings.preset == "reference")
