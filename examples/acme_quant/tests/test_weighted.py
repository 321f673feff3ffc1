"""acme_weighted lowers the error: with every scheme, in each layer, and in a whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

import acme_quant.plugin
from acme_quant.codebook import VALUES
from acme_quant.weighted import AcmeWeighted, MeanSquare
from acme_quant.weighted_config import AcmeWeightedConfig
from quark.algorithms import Metrics, RoundingTask, RoundToNearest
from quark.calibration.held_out import held_out_tokens
from quark.config.layer import QLayerConfig
from quark.config.templates.algorithms import algo_config_from_dict
from quark.errors import ConfigError
from quark.models.layers import QuantizedLayer, quantized_class
from quark.plugins import Catalog, algorithms, schemes, using
from quark.plugins.discovery import Source, discover
from quark.runs.quantize_block import quantize_blocks
from quark.runs.run import plan_run
from quark.runs.sink import InPlaceSink
from quark.runs.started_run import StartedRun
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark_tiny_model import calibration_batches, tiny_model

BUILT_IN = Catalog(c for c in discover() if c.source.distribution != "acme-quant")
WITH_ACME = Catalog(c for c in discover() if c.source.distribution != "acme-quant")
WITH_ACME.add(acme_quant.plugin, Source("acme-quant"))
with using(WITH_ACME):
    SCHEMES = [name for name in schemes().names() if schemes().load_config(name)().weight is not None]
TINY_TOKENS = calibration_batches(3, 32)


@pytest.fixture(autouse=True)
def acme() -> Iterator[None]:
    """The plugin, whether it is installed or not."""
    with using(WITH_ACME):
        yield


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer_of(weight: Tensor, scheme: str | QLayerConfig) -> QuantizedLayer:
    """A quantized layer whose weight is still float."""
    config = schemes().load_config(scheme)() if isinstance(scheme, str) else scheme
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
    return quantized_class(linear).from_float(linear, QLayerConfig(weight=config.weight))


def seen(*inputs: Tensor) -> MeanSquare:
    statistic = MeanSquare(inputs[0].shape[1], torch.device("cpu"))
    for x in inputs:
        statistic.update(x)
    return statistic


def rounded(layers: Mapping[str, QuantizedLayer], statistic: MeanSquare, **settings: Any) -> Mapping[str, Metrics]:
    return AcmeWeighted(AcmeWeightedConfig(**settings)).round(RoundingTask(layers, {MeanSquare: statistic}))


def loud_inputs(columns: int) -> Tensor:
    """Tokens whose channels have very different magnitudes."""
    return normal(50, columns, seed=1) * (2 * normal(columns, seed=2)).exp()


def weighted_error(layer: QuantizedLayer, weight: Tensor, inputs: Tensor) -> Tensor:
    """Of each row, float64."""
    assert isinstance(layer.weight, Tensor)
    return (layer.weight.double() - weight.double()).square() @ inputs.double().square().mean(0)


def test_mean_squares_that_merge_have_seen_both() -> None:
    x = normal(24, 16)
    merged = seen(x[:9])
    merged.merge(seen(x[9:], x[:0]))
    assert merged.tokens == 24
    torch.testing.assert_close(merged.value, x.double().square().mean(0).float(), rtol=1e-6, atol=0)
    assert torch.equal(MeanSquare(16, torch.device("cpu")).value, torch.zeros(16))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_in_every_scheme_weights_lie_on_the_grid_and_their_weighted_error_is_no_more_than_of_the_nearest(scheme: str) -> None:
    weight, inputs = normal(32, 256), loud_inputs(256)
    ours, nearest = layer_of(weight, scheme), layer_of(weight, scheme)
    RoundToNearest().round(RoundingTask({"l": nearest}))
    metrics = rounded({"l": ours}, seen(inputs))["l"]
    assert ours.weight_quantizer is not None
    quantizer = ours.weight_quantizer.quantizer
    codes = quantizer.codes_of(ours.weight.data, ours.weight_quantizer.qparams)
    assert torch.equal(quantizer.dequantize(codes, ours.weight_quantizer.qparams), ours.weight.data)
    error, plain = weighted_error(ours, weight, inputs), weighted_error(nearest, weight, inputs)
    # Errors were compared in float32: sums of 256 squares are off by 256 units in the last place at
    # most.
    assert (error <= plain * (1 + 2**-15)).all()
    assert metrics["error_share"] <= 1


def test_its_figure_is_the_share_of_the_error_that_is_left_which_is_less_where_channels_differ() -> None:
    weight, inputs = normal(32, 256), loud_inputs(256)
    ours, nearest = layer_of(weight, "acme_nf3_g64"), layer_of(weight, "acme_nf3_g64")
    RoundToNearest().round(RoundingTask({"l": nearest}))
    found = rounded({"l": ours}, seen(inputs))["l"]["error_share"]
    left = weighted_error(ours, weight, inputs) / weighted_error(nearest, weight, inputs)
    assert found == pytest.approx(float(left.mean()), rel=2**-14)
    assert 0 < float(left.mean()) < 0.9


def test_a_range_reaches_no_further_for_a_weight_whose_input_is_always_zero() -> None:
    weight, inputs = normal(1, 64).clamp(-1, 1), torch.ones(4, 64)
    weight[0, 7], inputs[:, 7] = 1.5, 0
    layer = layer_of(weight, "int4_wo_64")
    rounded({"l": layer}, seen(inputs), narrowest=0.5, steps=15)
    (scale,) = layer.weight_quantizer.qparams.scale.flatten().tolist()
    high = scale * 1.5 / float(_plain_scale(weight))
    assert high <= 1.1
    assert float(layer.weight[0, 7]) == pytest.approx(7 * scale)


def _plain_scale(weight: Tensor) -> Tensor:
    nearest = layer_of(weight, "int4_wo_64")
    RoundToNearest().round(RoundingTask({"l": nearest}))
    scale: Tensor = nearest.weight_quantizer.qparams.scale  # type: ignore[union-attr]
    return scale


def test_weights_that_lie_on_the_grid_already_stay() -> None:
    config = schemes().load_config("acme_nf3_g64")()
    wide = QLayerConfig(weight=config.weight.set(observer_options={"multiple": 1e6}))  # no range is cut short
    weight = VALUES.repeat(3, 16) * torch.tensor([1.0, 0.03, 700.0])[:, None]
    layer = layer_of(weight, wide)
    assert rounded({"l": layer}, seen(loud_inputs(128))) == {"l": {"error_share": 1.0}}
    assert torch.equal(layer.weight.data, weight)


def test_layers_with_one_input_are_rounded_together_as_each_alone() -> None:
    weights = {"q": normal(8, 128), "k": 3 * normal(4, 128, seed=5)}
    together = {name: layer_of(w, "acme_nf3_g64") for name, w in weights.items()}
    statistic = seen(loud_inputs(128))
    metrics = rounded(together, statistic)
    for name, weight in weights.items():
        alone = layer_of(weight, "acme_nf3_g64")
        assert rounded({name: alone}, statistic)[name]["error_share"] == pytest.approx(metrics[name]["error_share"], rel=1e-5)
        assert torch.equal(alone.weight.data, together[name].weight.data)


class Watched(AcmeWeighted):
    """Keeps the statistics that it receives."""

    def __init__(self) -> None:
        super().__init__(AcmeWeightedConfig())
        self.shown: dict[str, MeanSquare] = {}

    def round(self, task: RoundingTask) -> Mapping[str, Metrics]:
        self.shown |= dict.fromkeys(task.layers, task.statistic(MeanSquare))
        return super().round(task)


def test_every_layer_is_rounded_by_what_the_finished_model_gives_it_in_one_forward_a_sample() -> None:
    model = tiny_model()
    embedded: list[Tensor] = []
    hook = model.get_submodule("model.embed_tokens").register_forward_hook(lambda *call: embedded.append(call[-1]))
    config = LLMTemplate.get("llama").get_config(scheme="acme_nf3_g64", algorithm="acme_weighted")
    watched = Watched()
    run = plan_run(model, config)
    run = attrs.evolve(run, algorithms=attrs.evolve(run.algorithms, rounding=watched)).with_data(model, TINY_TOKENS, torch.device("cpu"))
    report = quantize_blocks(StartedRun(run, model), InPlaceSink(model))
    hook.remove()
    assert len(embedded) == len(TINY_TOKENS)
    finished: dict[str, list[Tensor]] = {name: [] for name in watched.shown}
    for name, inputs in finished.items():
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, into=inputs: into.append(args[0].flatten(0, -2)))
    with torch.no_grad():
        for batch in TINY_TOKENS:
            model(batch)
    assert len(finished) == 21
    for name, inputs in finished.items():
        x = torch.cat(inputs)[held_out_tokens(96) :]  # the first ones validate the codes
        statistic = MeanSquare(x.shape[1], x.device)
        statistic.update(x)
        torch.testing.assert_close(watched.shown[name].value, statistic.value, rtol=1e-6, atol=0)
        assert report.layers[name]["tokens"] == 96


def test_a_checkpoint_in_a_common_format_is_read_back_where_the_algorithm_is_not_installed(tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_64", algorithm="acme_weighted")
    model = ModelQuantizer(config).quantize_model(tiny_model(), TINY_TOKENS)
    export_safetensors(model, tmp_path / "out")
    with using(BUILT_IN):
        assert "acme_weighted" not in algorithms()
        loaded = import_model_from_safetensors(None, tmp_path / "out", device="cpu")
        with torch.no_grad():
            assert torch.equal(loaded(TINY_TOKENS[0]).logits, model(TINY_TOKENS[0]).logits)
    assert algo_config_from_dict(loaded.quant_config.algo_config[0].to_dict()) == AcmeWeightedConfig()


def test_settings_come_back_from_json_and_those_without_sense_are_refused() -> None:
    settings = AcmeWeightedConfig(narrowest=0.8, widest=1.0, steps=3)
    assert algo_config_from_dict(settings.to_dict()) == settings
    with pytest.raises(ConfigError, match=r"widest=0\.5 is not above narrowest=0\.6"):
        AcmeWeightedConfig(widest=0.5)
    with pytest.raises(ValueError, match="steps"):
        AcmeWeightedConfig(steps=1)
