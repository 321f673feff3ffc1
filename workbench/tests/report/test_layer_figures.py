"""Figures of layers: what a sample says is what the whole says."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import quark
from quark.algorithms import RoundingTask, RoundToNearest
from quark.models.layers import QuantizedLayer, quantized_class
from quark_workbench.report.layer_figures import BINS, WORST, InputSample, LayerFigures, histograms


def rounded(layer: nn.Module, scheme: str = "int4_wo_64") -> QuantizedLayer:
    quantized = quantized_class(layer).from_float(layer, quark.schemes().load_config(scheme)())
    RoundToNearest().round(RoundingTask({"layer": quantized}))
    return quantized


def figures_of(layers: dict[str, nn.Module]) -> tuple[dict[str, dict[str, object]], dict[str, dict[str, object]]]:
    weights: dict[str, dict[str, object]] = {}
    histograms: dict[str, dict[str, object]] = {}
    figures = LayerFigures(weights, histograms)
    for name, layer in layers.items():
        figures.add({name: layer}, {name: rounded(layer)}, {})
    return weights, histograms


@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (512, 1024), (2048, 640)])
def test_the_ratio_of_a_sample_is_that_of_the_weight(rows: int, columns: int) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(columns, rows, bias=False)
    layer.weight.data *= torch.rand(rows, 1) + 0.5  # rows of different sizes
    weights, _ = figures_of({"a": layer})
    error = layer.weight.data - rounded(layer).weight.data
    exact = 10 * math.log10(float(layer.weight.data.square().sum() / error.square().sum()))
    # Every so many rows are sampled, an odd number: one that is rounded up twice, so that at least a third of
    # what is asked for is left.
    most = min(layer.weight.numel(), 1 << 15)
    assert (1 if most < 1 << 15 else 1 / 3) * most <= weights["a"]["elements"] <= most
    assert weights["a"]["snr_db"] == pytest.approx(exact, abs=0.2 if layer.weight.numel() > 1 << 15 else 1e-4)


def test_a_transposed_layer_is_compared_element_by_element() -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    layer = Conv1D(384, 512)
    weights, _ = figures_of({"a": layer})
    error = layer.weight.data.t() - rounded(layer).weight.data
    exact = 10 * math.log10(float(layer.weight.data.square().sum() / error.square().sum()))
    assert weights["a"]["snr_db"] == pytest.approx(exact, abs=0.2)


def test_the_scale_ratio_finds_an_outlier() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(128, 64, bias=False)
    plain = figures_of({"a": layer})[0]["a"]["scale_ratio"]
    layer.weight.data[3, 5] = 100.0
    with_outlier = figures_of({"a": layer})[0]["a"]["scale_ratio"]
    assert plain < 2
    assert with_outlier == pytest.approx(100.0 / float(layer.weight.data.abs().reshape(-1, 64).amax(1).median()), rel=0.05)


def test_histograms_are_kept_of_the_worst_layers() -> None:
    torch.manual_seed(0)
    layers = {f"layers.{i}": nn.Linear(64, 8 + i, bias=False) for i in range(WORST + 6)}
    for i, layer in enumerate(layers.values()):
        layer.weight.data[:, 0] *= 1 + (7 * i) % (WORST + 6)
    weights, histograms = figures_of(dict(layers))
    assert set(histograms) == set(sorted(weights, key=lambda name: weights[name]["snr_db"])[:WORST])


def test_a_histogram_counts_every_value_in_one_range() -> None:
    values = torch.tensor([-1.0, 0.0, 0.5, 3.0])
    counts, zeros = histograms([(values, values.round()), (torch.zeros(5), None)])
    assert (counts["low"], counts["high"]) == (-1.0, 3.0)
    assert len(counts["float"]) == len(counts["rounded"]) == BINS
    assert sum(counts["float"]) == sum(counts["rounded"]) == 4
    assert counts["float"][-1] == counts["rounded"][-1] == 1
    assert zeros["float"][0] == 5


def test_what_has_no_ratio_has_none() -> None:
    layer = nn.Linear(64, 8, bias=False)
    nn.init.zeros_(layer.weight)
    figures = figures_of({"a": layer})[0]["a"]
    assert figures["snr_db"] is None
    assert figures["peak_to_rms"] == 0.0


def test_an_input_sample_has_the_peak_of_the_whole_input() -> None:
    x = torch.randn(300, 128, generator=torch.Generator().manual_seed(0))
    x[7, 3] = 1000.0
    sample = InputSample.of(x, x.round())
    layer, weights = nn.Linear(128, 8, bias=False), dict[str, dict[str, object]]()
    LayerFigures(weights, {}).add({"a": layer}, {"a": rounded(layer)}, {"a": sample})
    assert weights["a"]["input_peak_to_rms"] == pytest.approx(1000.0 / float(x.square().mean().sqrt()), rel=1e-5)
    assert len(sample.values) == 1 << 14
    assert sample.rounded is not None
    assert torch.equal(sample.rounded, sample.values.round())


def test_a_layer_whose_weight_stays_float_has_no_figures() -> None:
    layer = nn.Linear(64, 8)
    config = quark.schemes().load_config("int4_wo_64")()
    config.weight = None
    weights: dict[str, dict[str, object]] = {}
    LayerFigures(weights, {}).add({"a": layer}, {"a": quantized_class(layer).from_float(layer, config)}, {})
    assert weights == {}


def test_of_inputs_that_overflow_there_is_no_histogram() -> None:
    layer, x = nn.Linear(64, 8, bias=False), torch.ones(4, 64)
    x[0, 0] = math.inf
    histograms: dict[str, dict[str, object]] = {}
    LayerFigures({}, histograms).add({"a": layer}, {"a": rounded(layer)}, {"a": InputSample.of(x, None)})
    assert histograms["a"].keys() == {"weight"}
