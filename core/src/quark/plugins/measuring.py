"""Moments of a run at which plugins can measure tensors for its report. Making one imports nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import attrs


@attrs.frozen(kw_only=True, eq=False)
class Moment:
    """A moment of a run; its fields are objects of the run, in place.

    A plugin reads them while its hook runs, holds none of them, and changes none but the report. What it adds
    to the report of a block, as JSON values, the run keeps over a resume, and joins from all processes.
    """


@attrs.frozen(kw_only=True, eq=False)
class ForwardsStarted(Moment):
    """Calibration forwards are about to enter the model; nothing in a decoder block has been changed.

    Attributes:
        model: The float model.
        blocks: Its decoder blocks (`quark.models.plan.decoder_blocks.Block`).
        with_float: Whether each call has a second forward, of the float model
            (`quark.calibration.forwards.current_forward` says which one runs).
        report: The report of the run (`quark.calibration.report.CalibrationReport`).
        until_end: Takes what is to be undone when the forwards have ended, such as hooks.
    """

    model: Any
    blocks: Sequence[Any]
    with_float: bool
    report: Any
    until_end: ExitStack


@attrs.frozen(kw_only=True, eq=False)
class InputSeen(Moment):
    """The first tokens of the input of some layers, while its statistics are collected.

    Attributes:
        x: The input, float, ``[tokens, K]``: a view of a larger tensor.
        rounded: The same as the layers read it; None where the input is not quantized.
        samples: Takes what a plugin keeps of it, under the plugin's name; `LayersRounded.inputs` has it
            again.
    """

    x: Any
    rounded: Any
    samples: dict[str, Any]


@attrs.frozen(kw_only=True, eq=False)
class LayersRounded(Moment):
    """The layers of a block are rounded; the model has the float layers in their places for the last time.

    Attributes:
        block: Full name of the block, which all forwards have left; None for what lies outside the blocks.
        model: The model.
        layers: The quantized layers, by full name.
        inputs: What plugins have kept of the inputs of some of them (`InputSeen.samples`), by full name.
        report: As of `ForwardsStarted`; its ``weights``, ``histograms`` and ``blocks`` take figures.
    """

    block: str | None
    model: Any
    layers: Mapping[str, Any]
    inputs: Mapping[str, Mapping[str, Any]]
    report: Any
