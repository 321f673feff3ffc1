"""Round layers without calibration data: to nearest, or by a rounding that needs no statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quark.algorithms import Rounding, RoundToNearest
from quark.calibration.report import CalibrationReport
from quark.calibration.rounding_tasks import rounded_by, rounding_tasks
from quark.calibration.rounding_validation import round_validated
from quark.modules import QuantizedLayer
from quark.planning.decoder_blocks import Block

__all__ = ["round_to_nearest", "round_without_statistics"]


def round_without_statistics(
    rounding: Rounding, block: Block, layers: Mapping[str, QuantizedLayer], siblings: Sequence[Sequence[str]], report: CalibrationReport
) -> set[str]:
    """Round the layers that a rounding without ``needs`` applies to; returns their names, and puts its metrics into the report."""
    chosen = rounded_by(rounding, layers, block)
    for task in rounding_tasks(chosen, siblings):
        report.add({name: metrics for name, metrics in round_validated(rounding, task).items() if metrics})
    return set(chosen)


def round_to_nearest(layers: Mapping[str, QuantizedLayer], siblings: Sequence[Sequence[str]], *, defers: bool = False) -> set[str]:
    """Round the weights of layers to nearest, those of siblings with one scale; returns the layers' names.

    ``defers`` is as of `quark.algorithms.RoundToNearest`.
    """
    nearest = RoundToNearest(defers=defers)
    for task in rounding_tasks(layers, siblings):
        nearest.round(task)
    return set(layers)
