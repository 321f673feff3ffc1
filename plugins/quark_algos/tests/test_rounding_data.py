"""Whatever calibration data look like: forms, lengths, padding; too few of them, or none that are numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import quark
from quark.errors import QuarkError
from quark.specs.model import QConfig
from quark.torch import LLMTemplate, ModelQuantizer
from quark_algos.hessian import GPTAQConfig, GPTQConfig

from .runs import QRONOS, data, error, float_model, layers, off_grid, quantized, same, to_nearest


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
    counts = [{f["tokens"] for f in m.quark_findings.layers.values()} for m in (apart, padded, careless)]
    assert counts == [{178}, {178}, {256}]
    first = "model.layers.0.self_attn.q_proj"
    expected, found, wrong = (layers(m)[first].weight for m in (apart, padded, careless))
    assert (found != expected).float().mean() < 0.01 < (wrong != expected).float().mean()


def test_fewer_tokens_than_channels_are_damped_told_and_survived() -> None:
    for settings in (GPTQConfig(preset="reference"), QRONOS):
        model = quantized(settings, batches=[data()[0][:1, :40]])
        figures = model.quark_findings.layers.values()
        assert all(f["few_tokens"] and f["damping"] >= 0.1 and f["tokens"] == 40 for f in figures)
        assert error(model) < 3 * error(to_nearest())
        assert not off_grid(model)


def test_one_token_is_enough_to_get_through() -> None:
    model = quantized(GPTAQConfig(), "mxfp4", batches=[torch.tensor([[5]])])
    figures = model.quark_findings.layers.values()
    assert {f["tokens"] for f in figures} == {1}
    assert max(f["dead"] for f in figures) > 20, "of small inputs fp4 makes zeros"
    assert error(model) < 3 * error(to_nearest("mxfp4")), "channels that this token left out keep their weights"


def test_where_memory_is_short_blocks_are_passed_twice_and_it_is_nearly_as_good() -> None:
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_64")
    config.algo_config, config.activation_memory = [GPTAQConfig()], 0
    model = ModelQuantizer(config).quantize_model(copy.deepcopy(float_model()), data())
    assert any("passed twice" in note for note in model.quark_plan.notes)
    assert error(model) < 0.7 * error(to_nearest())


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 1e25])
def test_activations_that_overflow_are_refused(bad: float) -> None:
    config = QConfig(global_quant_config=quark.schemes().load("int4_wo_32", "config")(), algo_config=[GPTQConfig()])
    with pytest.raises(QuarkError, match="NaN or Inf"):
        ModelQuantizer(config).quantize_model(nn.Sequential(nn.Linear(32, 8)), [torch.full((4, 32), bad)])
