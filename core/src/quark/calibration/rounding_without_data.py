"""Round layers without calibration data: to nearest, or by a rounding that needs no statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quark.algorithms import Rounding, RoundToNearest
from quark.calibration.report import CalibrationReport
from quark.calibration.rounding_tasks import rounding_tasks
from quark.calibration.rounding_validation import round_validated
from quark.modules import QuantizedLayer

__all__ = ["round_to_nearest", "round_without_statistics"]


def round_without_statistics(
    rounding: Rounding, layers: Mapping[str, QuantizedLayer], siblings: Sequence[Sequence[str]], report: CalibrationReport
) -> set[str]:
    """Round layers by a rounding without ``needs``; returns their names, and puts its metrics into the report."""
    for task in rounding_tasks(layers, siblings):
        report.add({name: metrics for name, metrics in round_validated(rounding, task).items() if metrics})
    return set(layers)


def round_to_nearest(layers: Mapping[str, QuantizedLayer], siblings: Sequence[Sequence[str]], *, defers: bool = False) -> set[str]:
    """Round the weights of layers to nearest, those of siblings with one scale; returns the layers' names.

    ``defers`` is as of `quark.algorithms.RoundToNearest`.
    """
    nearest = RoundToNearest(defers=defers)
    for task in rounding_tasks(layers, siblings):
        nearest.round(task)
    return set(layers)
