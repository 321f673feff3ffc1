"""Measurement of layers, inputs and hidden states for the report, while the float weights are in memory."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from quark.calibration.report import CalibrationReport
from quark.plugins.measuring import ForwardsStarted, InputSeen, LayersRounded, Moment
from quark_workbench.report.hidden_states import DepthError
from quark_workbench.report.layer_figures import InputSample, LayerFigures, keep_worst

__all__ = ["measure"]

_SAMPLE = "quark-workbench"
"""Name under which the run keeps samples of inputs."""

_depth_of: WeakKeyDictionary[CalibrationReport, DepthError] = WeakKeyDictionary()
"""Dictionary from the report of a run to the errors of hidden states that are not yet in the report."""


def measure(moment: Moment) -> None:
    """Add figures of layers, layer inputs and blocks to the calibration report of a run.

    The entry of a block gets ``weights``, a summary of the signal-to-noise ratios of its layers. If
    calibration also runs forward passes of the float model, the entry gets ``hidden`` too: the error of the
    hidden states after the block (`depth_figures`).
    """
    if isinstance(moment, ForwardsStarted) and moment.with_float:
        depth = _depth_of[moment.report] = DepthError()
        moment.until_end.enter_context(depth.watching(moment.blocks))
    elif isinstance(moment, InputSeen):
        moment.samples[_SAMPLE] = InputSample.of(moment.x, moment.rounded)
    elif isinstance(moment, LayersRounded):
        samples = {name: kept[_SAMPLE] for name, kept in moment.inputs.items() if _SAMPLE in kept}
        floats = {name: moment.model.get_submodule(name) for name in moment.layers}
        LayerFigures(moment.report.weights, moment.report.histograms).add(floats, moment.layers, samples)
        keep_worst(moment.report.histograms, moment.report.weights)  # a resumed run has more: those of each finished block
        if moment.block is not None:
            of_block = moment.report.blocks.setdefault(moment.block or "model", {})
            of_block["weights"] = _in_short(moment.report.weights, moment.layers)
            if (errors := _depth_of.get(moment.report)) is not None and (hidden := errors.of(moment.block)):
                of_block["hidden"] = hidden


def _in_short(weights: Mapping[str, Mapping[str, Any]], names: Iterable[str]) -> dict[str, Any]:
    """Return the median signal-to-noise ratio of layers, and the name and ratio of the worst layer.

    Return ``{}`` if no layer has a ratio.
    """
    ratios = {name: ratio for name in names if (ratio := weights.get(name, {}).get("snr_db")) is not None}
    if not ratios:
        return {}
    worst = min(ratios, key=lambda name: ratios[name])
    return {"snr_db": statistics.median(ratios.values()), "worst": worst, "worst_snr_db": ratios[worst]}
