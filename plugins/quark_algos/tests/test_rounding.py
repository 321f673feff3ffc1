"""GPTQ, GPTAQ and Qronos in whole runs: their settings, what models and data may look like, and what is said about it."""

from __future__ import annotations

import copy
import json
from functools import cache
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

import quark
from quark.errors import QuarkError
from quark.nn import QuantizedLayer
from quark.specs.algorithm import AlgoConfig
from quark.specs.model import QConfig
from quark.testing import tiny
from quark.torch import LLMTemplate, ModelQuantizer
from quark_algos.hessian import GPTAQConfig, GPTQConfig, QronosConfig

QRONOS = QronosConfig(inside_layer_modules=[], model_decoder_layers="")
TOKENS, LAYERS = 512, 21


@cache
def float_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    return tiny.tiny_model(dtype)


@cache
def data() -> list[Tensor]:
    return list(torch.cat(tiny.calibration_batches(4, 128)).split(2))


def quantized(settings: AlgoConfig | None, scheme: str = "int4_wo_64", batches: Any = None, dtype: torch.dtype = torch.float32) -> Any:
    config = LLMTemplate.get("llama").get_config(scheme=scheme)
    config.algo_config = [settings] if settings else None
    return ModelQuantizer(config).quantize_model(copy.deepcopy(float_model(dtype)), data() if batches is None else batches)


def layers(model: nn.Module) -> dict[str, QuantizedLayer]:
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLayer)}


def scale(model: nn.Module, name: str) -> Tensor:
    found = layers(model)[name].weight_quantizer
    assert found is not None
    assert found.scale is not None
    return found.scale


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def error(model: nn.Module, batches: list[Tensor] | None = None) -> float:
    """Mean squared error of a logit on what was calibrated on, or on other tokens."""
    with torch.no_grad():
        return float(sum((model(x).logits - float_model()(x).logits).square().mean() for x in batches or data()))


def off_grid(model: nn.Module) -> list[str]:
    """Layers whose weight is not exactly what its codes say."""
    found = []
    for name, layer in layers(model).items():
        assert layer.weight_quantizer is not None
        quantizer, qparams = layer.weight_quantizer.quantizer, layer.weight_quantizer.qparams()
        weight = layer.weight.detach().float()
        again = quantizer.dequantize(quantizer.codes_of(weight, qparams), qparams).to(layer.weight.dtype)
        found += [] if torch.equal(again, layer.weight) else [name]
    return found


@pytest.mark.parametrize("preset", ["best", "reference"])
@pytest.mark.parametrize("settings", [GPTQConfig(), GPTAQConfig(), QRONOS], ids=lambda s: s.name)
def test_each_preset_rounds_all_layers_and_tells_how(settings: AlgoConfig, preset: str) -> None:
    model = quantized(attrs.evolve(settings, preset=preset))  # type: ignore[call-arg]
    figures = model.quark_findings.layers
    assert len(figures) == LAYERS
    assert json.loads(json.dumps(figures)) == figures
    said = [f["damping"] for f in figures.values()]
    if preset == "best":
        assert set(said) == {0.05}
    elif isinstance(settings, QronosConfig):
        assert all(0.001 < d < 1 for d in said), "a thousandth of the largest eigenvalue is more than that of the mean"
        assert len(set(said)) > LAYERS / 3
    else:
        assert set(said) == {0.01}
    assert {f["tokens"] for f in figures.values()} == {TOKENS}
    assert error(model) < 0.7 * error(quantized(None))
    assert not off_grid(model)


def test_a_higher_damping_than_that_of_the_preset_is_kept() -> None:
    assert {f["damping"] for f in quantized(GPTQConfig(damp_percent=0.2)).quark_findings.layers.values()} == {0.2}


def test_only_the_named_layers_are_taken_and_others_rounded_to_nearest() -> None:
    model, plain = quantized(GPTQConfig(inside_layer_modules=["self_attn.?_proj", "down_proj"])), quantized(None)
    taken = {n for n in layers(model) if "self_attn" in n or "down_proj" in n}
    assert set(model.quark_findings.layers) == taken
    assert {r.name for r in model.quark_plan.rows if r.algorithm == "gptq"} == taken
    for name, layer in layers(model).items():
        assert torch.equal(layer.weight, layers(plain)[name].weight) == (name not in taken), name


def test_static_scales_are_those_of_the_float_weight_and_fresh_ones_are_not() -> None:
    name = "model.layers.0.mlp.gate_proj"
    plain = scale(quantized(None), name)
    choices = {"preset": "reference", "inside_layer_modules": ["mlp.gate_proj"]}
    static = [quantized(GPTQConfig(desc_act=loud, **choices)) for loud in (True, False)]
    fresh = quantized(GPTQConfig(desc_act=False, static_groups=False, **choices))
    assert all(torch.equal(scale(m, name), plain) for m in static)
    assert torch.equal(scale(fresh, name)[..., :1], plain[..., :1]), "the first group is as it was when it is reached"
    assert not torch.equal(scale(fresh, name)[..., 1:], plain[..., 1:])
    assert len({layers(m)[name].weight.detach().numpy().tobytes() for m in (*static, fresh)}) == 3
    nearest = error(quantized(None))
    for model in (*static, fresh):
        assert error(model) < nearest
        assert not off_grid(model)


@pytest.mark.parametrize("scheme", ["uint4_wo_64", "mxfp4", "nvfp4", "int4_fp8", "mx6"])
def test_fresh_scales_work_with_other_formats(scheme: str) -> None:
    model = quantized(GPTQConfig(desc_act=False, static_groups=False), scheme)
    assert error(model) < 0.9 * error(quantized(None, scheme))
    assert not off_grid(model)


def test_layers_that_share_an_outer_scale_keep_sharing_it() -> None:
    model = quantized(GPTQConfig(), "nvfp4")
    for i in range(3):
        found = []
        for name in ("q", "k", "v"):
            quantizer = layers(model)[f"model.layers.{i}.self_attn.{name}_proj"].weight_quantizer
            assert quantizer is not None
            found.append(quantizer.qparams().scale_of_scales)
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])


def test_the_size_of_blocks_does_not_matter() -> None:
    one, other = (quantized(GPTQConfig(block_size=size)) for size in (24, 512))
    changed = [float((a.weight != b.weight).float().mean()) for a, b in zip(layers(one).values(), layers(other).values(), strict=True)]
    assert changed[0] < 1e-3, "sums in another order: a tie, and what follows from it"
    assert error(one) == pytest.approx(error(other), rel=0.1)


def test_float64_is_as_good_and_not_the_same() -> None:
    one, other = quantized(GPTQConfig()), quantized(GPTQConfig(float64=True))
    assert not same(one, other) or error(one) == error(other)
    assert error(one) == pytest.approx(error(other), rel=0.1)
    assert all(layer.weight.dtype is torch.float32 for layer in layers(other).values())


@pytest.mark.parametrize("choice", [{"scale_search": "mse"}, {"scale_search": "minmax"}, {"scale_refits": 1}, {"descent_passes": 2}], ids=str)
def test_single_choices_go_before_the_preset(choice: dict[str, Any]) -> None:
    model = quantized(GPTQConfig(**choice))
    assert not same(model, quantized(GPTQConfig()))
    assert error(model) < error(quantized(None))
    assert not off_grid(model)


@pytest.mark.parametrize("settings", [GPTQConfig(), GPTAQConfig(), QRONOS], ids=lambda s: s.name)
def test_two_runs_give_the_same_bits(settings: AlgoConfig) -> None:
    assert same(quantized(settings, "mxfp4"), quantized(settings, "mxfp4"))


def test_a_bfloat16_model_stays_one() -> None:
    model = quantized(GPTQConfig(), dtype=torch.bfloat16)
    assert {layer.weight.dtype for layer in layers(model).values()} == {torch.bfloat16}
    assert len(model.quark_findings.layers) == LAYERS
    assert error(model) < error(quantized(None, dtype=torch.bfloat16))


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
        assert error(model) < 3 * error(quantized(None))
        assert not off_grid(model)


def test_one_token_is_enough_to_get_through() -> None:
    model = quantized(GPTAQConfig(), "mxfp4", batches=[torch.tensor([[5]])])
    assert {f["tokens"] for f in model.quark_findings.layers.values()} == {1}
    assert error(model) < float("inf")


def test_where_memory_is_short_blocks_are_passed_twice_and_it_is_nearly_as_good() -> None:
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_64")
    config.algo_config, config.activation_memory = [GPTAQConfig()], 0
    model = ModelQuantizer(config).quantize_model(copy.deepcopy(float_model()), data())
    assert any("passed twice" in note for note in model.quark_plan.notes)
    assert error(model) < 0.7 * error(quantized(None))


def test_the_tied_head_is_left_alone_or_rounded_to_nearest_and_embeddings_stay() -> None:
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_64", exclude_layers=[])
    config.algo_config = [GPTQConfig()]
    model: Any = ModelQuantizer(config).quantize_model(copy.deepcopy(float_model()), data())
    before: Any = float_model()
    assert torch.equal(model.model.embed_tokens.weight, before.model.embed_tokens.weight)
    assert not torch.equal(model.lm_head.weight, before.lm_head.weight)
    assert "lm_head" not in model.quark_findings.layers
    kept = quantized(GPTQConfig())
    assert kept.lm_head.weight is kept.model.embed_tokens.weight


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


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 1e25])
def test_activations_that_overflow_are_refused(bad: float) -> None:
    config = QConfig(global_quant_config=quark.schemes().load("int4_wo_32", "config")(), algo_config=[GPTQConfig()])
    with pytest.raises(QuarkError, match="NaN or Inf"):
        ModelQuantizer(config).quantize_model(nn.Sequential(nn.Linear(32, 8)), [torch.full((4, 32), bad)])
