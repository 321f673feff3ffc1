"""Cells of `benchmarks.defaults`, each for itself and all together; needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from benchmarks.paired import Difference, difference, log_ratio


@attrs.frozen
class Row:
    """One cell of a comparison: a setting against the first.

    Attributes:
        kl: Mean KL divergence of the first setting, in nats.
        kl_change: Its difference with the setting.
        perplexity: Of the first setting.
        nll_change: Difference of the negative log-likelihood; the perplexity changes by its exponential.
    """

    kl: float
    kl_change: Difference
    perplexity: float
    nll_change: Difference


def row_of(cell: Mapping[str, Any], before: str, after: str) -> Row:
    """Return the comparison of two settings in one cell."""
    one, other = cell["values"][before], cell["values"][after]
    mean_kl, mean_nll = (math.fsum(one[name]) / len(one[name]) for name in ("kl", "nll"))
    return Row(mean_kl, difference(one["kl"], other["kl"]), math.exp(mean_nll), difference(one["nll"], other["nll"]))


def pooled(cells: Sequence[Mapping[str, Any]], before: str, after: str) -> Difference:
    """Return the mean of ``ln(KL after ÷ KL before)`` over the sequences of all cells."""
    return log_ratio(
        ((cell["model"], cell["evaluation"], i), one, other)
        for cell in cells
        for i, (one, other) in enumerate(zip(cell["values"][before]["kl"], cell["values"][after]["kl"], strict=True))
    )
