"""Figures of a run come from quark-workbench alone, survive a resume, and a run can go without them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from quark.plugins.catalog import catalog, using
from quark.plugins.measuring import LayersRounded
from quark.runs import ModelQuantizer, quantize_checkpoint
from quark.torch import LLMTemplate
from quark_devkit.own_catalog import among
from quark_devkit.whole_runs import interrupted_behind
from quark_tiny_model import calibration_batches, tiny_model, tiny_model_dir
from quark_workbench.report import ReportOptions, read_report

OF_A_LAYER = {"snr_db", "peak_to_rms", "elements", "scale_ratio", "input_peak_to_rms"}
MEASURED = ("layers", "depth", "histograms")


def config() -> Any:
    return LLMTemplate.get("llama").get_config(scheme="int4_wo_64", algorithm=["qronos"])


def report_of(directory: Path) -> dict[str, Any]:
    report = read_report(directory)
    assert report is not None
    return report


def test_a_run_has_figures_of_every_layer_and_of_every_block_behind_which_float_forwards_pass() -> None:
    report: Any = ModelQuantizer(config()).quantize_model(tiny_model(), calibration_batches(4, 128)).quark_report
    layers = [f"model.layers.{n}.{part}" for n in range(3) for part in ("self_attn.q_proj", "mlp.down_proj")]
    assert all(report.weights[name].keys() == OF_A_LAYER for name in layers)
    assert len(report.histograms) == 8
    assert all(histogram.keys() == {"weight", "input"} for histogram in report.histograms.values())
    assert [row["hidden"].keys() for name, row in report.blocks.items() if name.startswith("model.")] == [
        {"relative_error", "snr_db", "tokens"}
    ] * 3


def test_a_resumed_run_has_the_figures_of_the_blocks_that_were_finished(tmp_path: Path) -> None:
    data = calibration_batches(4, 128)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    quantize_checkpoint(tiny_model_dir(), whole, config(), data, report=ReportOptions())
    for part in (interrupted_behind(2), nullcontext()):
        with part:
            quantize_checkpoint(tiny_model_dir(), resumed, config(), data, report=ReportOptions(), resume=isinstance(part, nullcontext))
    expected, found = report_of(whole), report_of(resumed)
    assert expected["depth"]["blocks"]
    assert {key: found[key] for key in MEASURED} == {key: expected[key] for key in MEASURED}


def test_without_the_workbench_a_run_has_the_same_weights_and_no_such_figures() -> None:
    others = {source.distribution for source in catalog().sources()} - {"quark-workbench"}
    data = calibration_batches(4, 128)
    expected: Any = ModelQuantizer(config()).quantize_model(tiny_model(), data)
    with using(among(catalog(), others)):
        found: Any = ModelQuantizer(config()).quantize_model(tiny_model(), data)
    assert {name: tensor.tolist() for name, tensor in found.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in expected.state_dict().items()
    }
    assert found.quark_report.layers == expected.quark_report.layers
    assert found.quark_report.weights == found.quark_report.histograms == {}
    assert not any("hidden" in row for row in found.quark_report.blocks.values())


def test_a_plugin_that_cannot_measure_is_named_and_the_run_goes_on(site: Any, caplog: pytest.LogCaptureFixture) -> None:
    site.install("acme-quant", "@hookimpl\ndef quark_measure(moment):\n    raise RuntimeError('no ruler')")
    made = site.collect()
    made.measure(LayersRounded(block=None, model=None, layers={}, inputs={}, report=None))
    assert "raised in quark_measure for 'LayersRounded'" in caplog.text
