"""Compare settings in the cells of `benchmarks.defaults`: in each cell alone, and over all cells.

The module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from benchmarks.paired import Difference, difference, log_ratio

MEASURES = {"kl": "KL", "distance": "1 − cosine"}
"""The measures of a cell, and their names in tables."""


@attrs.frozen
class Row:
    """The comparison of a setting with the first setting in one cell.

    Attributes:
        measure: Name of the measure: KL divergence (in nats), or 1 − cosine of embeddings.
        mean: Mean of the measure with the first setting.
        change: The measure with the setting minus the measure with the first setting.
        perplexity: Perplexity with the first setting, and the difference of the negative log-likelihood
            between the two settings; None for a model that predicts no tokens.
    """

    measure: str
    mean: float
    change: Difference
    perplexity: tuple[float, Difference] | None


def row_of(cell: Mapping[str, Any], before: str, after: str) -> Row:
    """Return the comparison of the settings named ``before`` and ``after`` in one cell."""
    one, other, name = cell["values"][before], cell["values"][after], _measure(cell)
    perplexity = (math.exp(_mean(one["nll"])), difference(one["nll"], other["nll"])) if "nll" in one else None
    return Row(MEASURES[name], _mean(one[name]), difference(one[name], other[name]), perplexity)


def measures_of(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the measures that the cells have, with their names in tables."""
    names = {_measure(cell) for cell in cells}
    return [text for name, text in MEASURES.items() if name in names]


def pooled(cells: Sequence[Mapping[str, Any]], before: str, after: str) -> Difference:
    """Return the mean of ``ln(after ÷ before)`` over the sequences of all cells.

    ``before`` and ``after`` are the cell's measures with the two settings.
    """
    return log_ratio(
        ((cell["model"], cell["evaluation"], i), one, other)
        for cell in cells
        for name in [_measure(cell)]
        for i, (one, other) in enumerate(zip(cell["values"][before][name], cell["values"][after][name], strict=True))
    )


def _measure(cell: Mapping[str, Any]) -> str:
    return next(name for name in MEASURES if any(name in values for values in cell["values"].values()))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
