"""Moments of a run at which plugins can measure tensors for its report. This module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import attrs


@attrs.frozen(kw_only=True, eq=False)
class Moment:
    """A moment of a run. Its fields are the objects of the run, not copies.

    A plugin may read them while its hook runs. It must not keep them, and may change only the report. Figures
    that it adds to a block must be JSON values. A resumed run keeps them, and they are gathered from all
    processes.
    """


@attrs.frozen(kw_only=True, eq=False)
class ForwardsStarted(Moment):
    """Calibration forwards are about to start; no decoder block has been changed.

    Attributes:
        model: The float model.
        blocks: Its decoder blocks (`quark.models.plan.decoder_blocks.Block`).
        with_float: Whether each call has a second forward, of the float model
            (`quark.calibration.forwards.current_forward` says which one runs).
        report: The report of the run (`quark.calibration.report.CalibrationReport`).
        until_end: Enter contexts here, such as hooks. They are closed when the forwards have ended.
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
        rounded: The quantized input, which the layers read; None if the input is not quantized.
        samples: Store your sample here under the name of your plugin. `LayersRounded.inputs` returns it.
    """

    x: Any
    rounded: Any
    samples: dict[str, Any]


@attrs.frozen(kw_only=True, eq=False)
class LayersRounded(Moment):
    """The layers of a block are rounded. The model still has the float layers, which are replaced next.

    Attributes:
        block: Full name of the block, which all forwards have left; None for layers outside the blocks.
        model: The model.
        layers: The quantized layers, by full name.
        inputs: Samples that plugins have stored (`InputSeen.samples`), by full name, for some layers.
        report: The report of the run. Its ``weights``, ``histograms`` and ``blocks`` take figures.
    """

    block: str | None
    model: Any
    layers: Mapping[str, Any]
    inputs: Mapping[str, Mapping[str, Any]]
    report: Any
