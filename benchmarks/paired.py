"""Statistics for `benchmarks.defaults`: differences of two settings, their standard errors, and verdicts.

Two settings are measured on the same sequences, so the difference does not depend on how hard the sequences
are. The statistics treat sequences as independent, but not the tokens of one sequence. A verdict is *equal*
if the 95 % confidence interval of the difference, from Student's t distribution, contains 0. Otherwise, it is
*better* or *worse*. With few sequences the interval is wide.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate

import attrs

EQUAL, BETTER, WORSE, MIXED = "equal", "better", "worse", "mixed"
CONFIDENCE = 0.95
_STEPS = 20_000


@cache
def student_t(degrees: int) -> float:
    """Return the number t for which 95 % of Student's t distribution lies between −t and t.

    ``degrees`` is the number ν of degrees of freedom. With ``x = √ν tan θ``, the density is proportional to
    ``cos^(ν − 1) θ``, and the function integrates over θ.

    >>> [round(student_t(n), 3) for n in (1, 3, 10, 1000)]
    [12.706, 3.182, 2.228, 1.962]
    """
    step = math.pi / 2 / _STEPS
    areas = list(accumulate(math.cos((i + 0.5) * step) ** (degrees - 1) for i in range(_STEPS)))
    at = next(i for i, area in enumerate(areas) if area >= CONFIDENCE * areas[-1])
    before = areas[at - 1] if at else 0.0
    share = (CONFIDENCE * areas[-1] - before) / (areas[at] - before)
    return math.sqrt(degrees) * math.tan((at + share) * step)


@attrs.frozen
class Difference:
    """The mean of differences between two settings, and the standard error of the mean.

    Attributes:
        mean: Mean over independent units, such as sequences. It is below 0 if the second setting is better.
        error: Standard error of the mean; None for fewer than two units.
        units: Number of units.
    """

    mean: float
    error: float | None
    units: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Difference:
        """Return the mean and the standard error of ``values``, which has one value per unit."""
        count, mean = len(values), math.fsum(values) / len(values)
        if count < 2:
            return cls(mean, None, count)
        variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
        return cls(mean, math.sqrt(variance / count), count)

    @property
    def verdict(self) -> str:
        """The verdict about the second setting: `BETTER`, `WORSE` or `EQUAL`."""
        if self.error is None or abs(self.mean) <= student_t(self.units - 1) * self.error:
            return EQUAL
        return BETTER if self.mean < 0 else WORSE


def difference(before: Sequence[float], after: Sequence[float]) -> Difference:
    """Return the mean of ``after − before``, with its standard error.

    Both arguments have one value for each sequence, in the same order.
    """
    return Difference.of([b - a for a, b in zip(before, after, strict=True)])


def log_ratio(pairs: Iterable[tuple[Hashable, float, float]]) -> Difference:
    """Return the mean of ``ln(after ÷ before)`` over sequences, with its standard error.

    Args:
        pairs: Tuples of a sequence, the value before, and the value after; both values are above 0. A
            sequence has several pairs if there are several schemes or seeds. These pairs are not independent,
            so they are averaged first.
    """
    of_sequence: dict[Hashable, list[float]] = {}
    for sequence, before, after in pairs:
        of_sequence.setdefault(sequence, []).append(math.log(after / before))
    return Difference.of([math.fsum(values) / len(values) for values in of_sequence.values()])


def overall(verdicts: Sequence[str]) -> str:
    """Return the verdict over all cells, which decides whether a default may change.

    The verdict is `BETTER` if most cells are better and none is worse, and `WORSE` if most are worse and none
    is better. It is `MIXED` if some cells are better and some are worse, and `EQUAL` otherwise.
    """
    better, worse = verdicts.count(BETTER), verdicts.count(WORSE)
    if better and worse:
        return MIXED
    most = len(verdicts) / 2
    return BETTER if better > most else WORSE if worse > most else EQUAL


def counts(verdicts: Sequence[str]) -> Mapping[str, int]:
    """Return a dictionary from verdict to number of cells."""
    return {name: verdicts.count(name) for name in (BETTER, EQUAL, WORSE)}
