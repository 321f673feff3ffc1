"""Effects of the settings of GPTQ, GPTAQ and Qronos in whole runs, and their metrics and messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

import quark
from quark.algorithms import Hessian, Hessian64
from quark.config.algorithm import AlgoConfig
from quark.config.layer import QLayerConfig, TensorSpec
from quark.config.model import QConfig
from quark.config.tensor import QTensorConfig
from quark.models.layers import QuantizedLayer
from quark.numbers import GroupScales, WeightGrid
from quark.torch import LLMTemplate, ModelQuantizer
from quark_algos.gptq.config import GPTAQConfig, GPTQConfig, QronosConfig
from quark_algos.gptq.damping import damped
from quark_algos.gptq.gptq import ColumnRounding
from quark_algos.scale_search import search

from ..runs import BLOCKS, LAYERS, QRONOS, TOKENS, error, layers, off_grid, quantized, quantized_once, same, to_nearest


def scale(layer: QuantizedLayer) -> Tensor:
    found = layer.weight_quantizer
    assert found is not None
    assert found.scale is not None
    return found.scale


@pytest.mark.parametrize("preset", ["best", "reference"])
@pytest.mark.parametrize("settings", [GPTQConfig(), GPTAQConfig(), QRONOS], ids=lambda s: s.name)
def test_each_preset_rounds_all_layers_and_tells_how(settings: AlgoConfig, preset: str) -> None:
    model = quantized_once(attrs.evolve(settings, preset=preset))  # type: ignore[call-arg]
    metrics = model.quark_report.layers
    assert len(metrics) == LAYERS
    assert json.loads(json.dumps(metrics)) == metrics
    said = [f["damping"] for f in metrics.values()]
    if preset == "best":
        assert set(said) == {0.05}
    elif isinstance(settings, QronosConfig):
        assert all(0.001 < d < 1 for d in said), "a thousandth of the largest eigenvalue is more than that of the mean"
        assert len(set(said)) > LAYERS / 3
    else:
        assert set(said) == {0.01}
    assert {f["tokens"] for f in metrics.values()} == {TOKENS}
    assert error(model) < 0.7 * error(to_nearest())
    assert not off_grid(model)


def test_a_higher_damping_than_that_of_the_preset_is_kept() -> None:
    assert {f["damping"] for f in quantized(GPTQConfig(damp_percent=0.2)).quark_report.layers.values()} == {0.2}


def test_only_the_named_layers_are_taken_and_others_rounded_to_nearest() -> None:
    model, plain = quantized(GPTQConfig(inside_layer_modules=["self_attn.?_proj", "down_proj"])), to_nearest()
    taken = {n for n in layers(model) if "self_attn" in n or "down_proj" in n}
    assert set(model.quark_report.layers) == taken
    assert {r.name for r in model.quark_plan.rows if r.algorithm == "gptq"} == taken
    for name, layer in layers(model).items():
        assert torch.equal(layer.weight, layers(plain)[name].weight) == (name not in taken), name


def test_static_scales_are_those_of_the_float_weight_and_fresh_ones_are_not() -> None:
    name = "model.layers.0.mlp.gate_proj"
    plain = scale(layers(to_nearest())[name])
    choices = {"preset": "reference", "inside_layer_modules": ["mlp.gate_proj"]}
    static = [quantized(GPTQConfig(desc_act=act_order, **choices)) for act_order in (True, False)]
    fresh = quantized(GPTQConfig(desc_act=False, static_groups=False, **choices))
    assert all(torch.equal(scale(layers(m)[name]), plain) for m in static)
    assert torch.equal(scale(layers(fresh)[name])[..., :1], plain[..., :1]), "the first group is as it was when it is reached"
    assert not torch.equal(scale(layers(fresh)[name])[..., 1:], plain[..., 1:])
    assert len({layers(m)[name].weight.detach().numpy().tobytes() for m in (*static, fresh)}) == 3
    nearest = error(to_nearest())
    for model in (*static, fresh):
        assert error(model) < nearest
        assert not off_grid(model)


@pytest.mark.parametrize("scheme", ["uint4_wo_64", "mxfp4", "nvfp4", "int4_fp8", "mx6"])
def test_fresh_scales_work_with_other_formats(scheme: str) -> None:
    model = quantized(GPTQConfig(desc_act=False, static_groups=False), scheme)
    assert error(model) < error(to_nearest(scheme))
    assert all(f["held_out_error"] < 0.9 for f in model.quark_report.layers.values())
    assert not off_grid(model)


def test_layers_that_share_an_outer_scale_keep_sharing_it() -> None:
    model = quantized(GPTQConfig(), "nvfp4")
    for i in range(BLOCKS):
        found = []
        for name in ("q", "k", "v"):
            quantizer = layers(model)[f"model.layers.{i}.self_attn.{name}_proj"].weight_quantizer
            assert quantizer is not None
            found.append(quantizer.qparams.outer_scale)
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])


def alike(one: nn.Module, other: nn.Module) -> None:
    """The first layers, which have the same inputs, have the same codes, and as small an error.

    A tie, and what follows from it, may differ.
    """
    for name in ("q_proj", "k_proj", "v_proj"):
        key = f"model.layers.0.self_attn.{name}"
        assert float((layers(one)[key].weight != layers(other)[key].weight).float().mean()) < 1e-3
        found, expected = (model.quark_report.layers[key]["output_mse"] for model in (one, other))
        assert found == pytest.approx(expected, rel=1e-3)
    assert error(one) == pytest.approx(error(other), rel=0.1)  # of ties, layer after layer


def test_the_size_of_blocks_does_not_matter() -> None:
    alike(quantized(GPTQConfig(block_size=24)), quantized(GPTQConfig(block_size=512)))


def test_float64_is_asked_for_and_as_good() -> None:
    assert list(ColumnRounding(GPTQConfig(float64=True)).needs) == [Hessian64]
    other = quantized(GPTQConfig(float64=True))
    alike(quantized_once(GPTQConfig()), other)
    assert all(layer.weight.dtype is torch.float32 for layer in layers(other).values())


def test_without_its_share_the_correction_leaves_gptq_and_with_it_something_else() -> None:
    plain = quantized_once(GPTQConfig())
    assert same(quantized(GPTAQConfig(alpha=0.0)), plain)
    assert same(quantized(attrs.evolve(QRONOS, correction_share=0.0)), plain)
    assert not same(quantized_once(GPTAQConfig()), plain)
    assert not same(quantized_once(GPTAQConfig()), quantized_once(GPTAQConfig(alpha=0.5)))
    assert not same(quantized_once(QRONOS), plain)


def test_fresh_scales_are_searched_by_the_moments_of_their_own_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    def spy(t: Tensor, grid: WeightGrid, moments: Tensor, coarse: Sequence[float]) -> GroupScales:
        seen.append(moments)
        return search(t, grid, moments, coarse)

    monkeypatch.setattr("quark_algos.gptq.gptq.search", spy)
    x = torch.randn(200, 96, generator=torch.Generator().manual_seed(0)) @ torch.randn(96, 96, generator=torch.Generator().manual_seed(1))
    settings = GPTQConfig(desc_act=False, static_groups=False)
    config = QConfig(global_quant_config=quark.schemes().load_config("int4_wo_32")(), algo_config=[settings])
    ModelQuantizer(config).quantize_model(nn.Sequential(nn.Linear(96, 8)), [x])
    hessian = Hessian(96, x.device)
    hessian.update(x)
    expected = damped(hessian.matrix(), 0.05, hessian.shrinkage())
    assert len(seen) == 3
    for number, moments in enumerate(seen):
        torch.testing.assert_close(moments, expected.diagonal()[None, 32 * number : 32 * number + 32])


def one_layer(
    settings: AlgoConfig | None, spec: TensorSpec | None = None, *, tokens: int = 200, silent: int | None = None
) -> tuple[Tensor, Tensor, QuantizedLayer]:
    """A weight ``[8, 96]``, its inputs ``[tokens, 96]``, and the layer they become.

    Channel 40 is the loudest and 7 the quietest.
    """
    g = torch.Generator().manual_seed(0)
    x = torch.randn(200, 96, generator=g) @ (torch.randn(96, 96, generator=g) / 10 + torch.eye(96))
    x[:, 40] *= 10
    x[:, 7] /= 10
    x = x[:tokens]
    if silent is not None:
        x[:, silent] = 0
    layer = nn.Linear(96, 8, bias=False)
    layer.weight = nn.Parameter(torch.randn(8, 96, generator=g) / 10)
    weight = layer.weight.detach().clone()
    config = QLayerConfig(weight=spec or quark.schemes().load_config("int4_wo_32")().weight)
    model = ModelQuantizer(QConfig(global_quant_config=config, algo_config=[settings] if settings else None))
    (rounded,) = layers(model.quantize_model(nn.Sequential(layer), [x])).values()
    return weight, x, rounded


@pytest.mark.parametrize(("desc_act", "first", "last"), [(True, 40, 7), (False, 0, 95)])
def test_columns_go_by_descending_loudness_or_in_their_own_order(desc_act: bool, first: int, last: int) -> None:
    """The first column takes in no error of others, so that it is rounded to nearest."""
    rounded = one_layer(GPTQConfig(desc_act=desc_act, preset="reference"))[2].weight
    nearest = one_layer(None)[2].weight
    assert torch.equal(rounded[:, first], nearest[:, first])
    assert not torch.equal(rounded[:, last], nearest[:, last])


@pytest.mark.parametrize(("tokens", "is_zero"), [(200, True), (102, True), (101, False)])  # six of the last two are held out
def test_weights_of_a_channel_that_is_always_0_become_0_where_there_were_tokens_enough_to_know(tokens: int, is_zero: bool) -> None:
    rounded = one_layer(GPTQConfig(), tokens=tokens, silent=11)[2].weight
    assert bool((rounded[:, 11] == 0).all()) == is_zero
    assert bool((rounded[:, 12] != 0).any())


@pytest.mark.parametrize(
    "spec",
    [
        QTensorConfig(dtype="fp8_e4m3", qscheme="per_block", block_size=(4, 32), is_dynamic=False),
        QTensorConfig(dtype="int4", qscheme="per_channel", ch_axis=1, symmetric=True, is_dynamic=False),
        QTensorConfig(dtype="uint4", qscheme="per_channel", ch_axis=1, symmetric=False, is_dynamic=False),
    ],
    ids=["blocks", "channels of axis 1", "with zero points"],
)
def test_scales_that_span_rows_come_back_to_them_and_their_codes_are_better(spec: QTensorConfig) -> None:
    weight, x, nearest = one_layer(None, spec)
    published, best = (one_layer(GPTQConfig(preset=preset), spec)[2] for preset in ("reference", "best"))
    assert torch.equal(scale(published), scale(nearest))
    for rounded in (published, best):
        assert not off_grid(nn.Sequential(rounded))
        errors = [float((x @ (layer.weight - weight).t()).square().sum()) for layer in (rounded, nearest)]
        assert errors[0] < 0.9 * errors[1]


@pytest.mark.parametrize("choice", [{"scale_search": "mse"}, {"scale_search": "minmax"}], ids=str)
def test_single_choices_go_before_the_preset(choice: dict[str, Any]) -> None:
    model = quantized(GPTQConfig(**choice))
    assert not same(model, quantized_once(GPTQConfig()))
    assert error(model) < error(to_nearest())
    assert not off_grid(model)


@pytest.mark.parametrize("settings", [GPTQConfig(), GPTAQConfig(), QRONOS], ids=lambda s: s.name)
def test_two_runs_give_the_same_bits(settings: AlgoConfig) -> None:
    assert same(quantized(settings, "mxfp4"), quantized(settings, "mxfp4"))


def test_settings_of_one_configuration_are_not_those_of_another() -> None:
    template = LLMTemplate.get("llama")
    first = template.get_config(scheme="int4_wo_64", algorithm="gptq").algo_config
    assert first
    changed: Any = first[0]
    changed.preset = "reference"
    second: Any = template.get_config(scheme="int4_wo_64", algorithm="gptq").algo_config
    try:
        assert second[0].preset == "best"
    finally:
        changed.preset = "best"
