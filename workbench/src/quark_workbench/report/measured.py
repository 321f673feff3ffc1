"""What the report measures in a run, while float weights are in memory: layers, inputs and hidden states."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from quark.calibration.report import CalibrationReport
from quark.plugins.measuring import ForwardsStarted, InputSeen, LayersRounded, Moment
from quark_workbench.report.hidden_states import DepthError
from quark_workbench.report.layer_figures import InputSample, LayerFigures

__all__ = ["measure"]

_SAMPLE = "quark-workbench"
"""The name under which a run keeps the sample of an input."""

_depth_of: WeakKeyDictionary[CalibrationReport, DepthError] = WeakKeyDictionary()
"""The errors of hidden states of each run, by its report, until they are in it."""


def measure(moment: Moment) -> None:
    """Add figures to the report of a run: of layers and inputs, as `LayerFigures`; of blocks, ``hidden``.

    ``hidden`` is the error of the hidden states behind the block, as `depth_figures`; a run has it if its
    calibration has forwards of the float model beside those of the quantized one.
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
        errors = _depth_of.get(moment.report)
        if errors is not None and moment.block is not None and (hidden := errors.of(moment.block)):
            moment.report.blocks.setdefault(moment.block or "model", {})["hidden"] = hidden
