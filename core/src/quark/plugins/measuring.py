"""Moments of a run at which plugins can measure tensors for the report. This module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import attrs


@attrs.frozen(kw_only=True, eq=False)
class Moment:
    """A moment of a run. Its fields are the objects of the run, not copies.

    A plugin may read these objects while its hook runs. It must not store references to them, and must not
    change any of them except the report. Figures that a plugin adds to a block of the report must be JSON
    values. If a run is resumed, its report contains the figures of the earlier run. If several processes
    share a run, the report contains the figures of all processes.
    """


@attrs.frozen(kw_only=True, eq=False)
class ForwardsStarted(Moment):
    """The calibration forward passes are about to start. No decoder block has been changed.

    Attributes:
        model: The float model.
        blocks: Decoder blocks of the model (`quark.models.plan.decoder_blocks.Block`).
        with_float: Whether there is a second forward pass of the float model for each sample.
            `quark.calibration.forwards.current_forward` says which of the two is running.
        report: The report of the run (`quark.calibration.report.CalibrationReport`).
        until_end: A stack of contexts that is closed after the last forward pass. A plugin can enter its own
            contexts here, for example to remove the forward hooks that it adds to the model.
    """

    model: Any
    blocks: Sequence[Any]
    with_float: bool
    report: Any
    until_end: ExitStack


@attrs.frozen(kw_only=True, eq=False)
class InputSeen(Moment):
    """A calibration run collects statistics of the input of some layers. This moment contains the first
    tokens of the input.

    Attributes:
        x: The float input, a tensor of shape ``[tokens, K]`` with K input channels. It is a view of a larger
            tensor.
        rounded: The quantized input, which the layers use to compute their output. None if the input is not
            quantized.
        samples: A dictionary in which a plugin can store a sample of the input, under the name of the plugin.
            `LayersRounded.inputs` contains the sample later.
    """

    x: Any
    rounded: Any
    samples: dict[str, Any]


@attrs.frozen(kw_only=True, eq=False)
class LayersRounded(Moment):
    """The layers of a block are rounded. The model still has the float layers. quark replaces them next.

    Attributes:
        block: Full name of the block. All samples have run through the block. None for layers outside the
            blocks.
        model: The model, with the float layers of this block.
        layers: Mapping from the full name of a layer to the quantized layer.
        inputs: Mapping from the full name of a layer to the samples that plugins stored in
            `InputSeen.samples`. It contains only some of the layers.
        report: The report of the run. Plugins can add figures to its ``weights``, ``histograms`` and
            ``blocks``.
    """

    block: str | None
    model: Any
    layers: Mapping[str, Any]
    inputs: Mapping[str, Mapping[str, Any]]
    report: Any
