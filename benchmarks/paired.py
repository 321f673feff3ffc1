"""Statistics of `benchmarks.defaults`: paired standard errors by sequence, and verdicts.

Both settings are measured on the same sequences, so hard sequences do not blur the difference. Sequences
count as independent; tokens of one sequence do not. A verdict is *better* or *worse* if the 95 % interval of
Student's t distribution excludes zero difference, and otherwise *equal*. With few sequences the interval is
wide.
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
    """Return the t such that 95 % of Student's distribution with these degrees of freedom lies within ± t.

    The density is integrated over the angle θ with ``x = √ν tan θ``, where it is ``cos^(ν − 1) θ``.

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
    """A mean difference and its standard error.

    Attributes:
        mean: Mean over independent units, such as sequences; below 0 if the second setting is better.
        error: Its standard error; None for fewer than two units.
        units: Number of units.
    """

    mean: float
    error: float | None
    units: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Difference:
        """Return the mean and the standard error of one value per unit."""
        count, mean = len(values), math.fsum(values) / len(values)
        if count < 2:
            return cls(mean, None, count)
        variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
        return cls(mean, math.sqrt(variance / count), count)

    @property
    def verdict(self) -> str:
        """`BETTER`, `WORSE` or `EQUAL`."""
        if self.error is None or abs(self.mean) <= student_t(self.units - 1) * self.error:
            return EQUAL
        return BETTER if self.mean < 0 else WORSE


def difference(before: Sequence[float], after: Sequence[float]) -> Difference:
    """Return the mean difference ``after − before`` of values of the same sequences."""
    return Difference.of([b - a for a, b in zip(before, after, strict=True)])


def log_ratio(pairs: Iterable[tuple[Hashable, float, float]]) -> Difference:
    """Return the mean of ``ln(after ÷ before)`` over sequences.

    Args:
        pairs: Sequence, value before, and value after, both above 0. Values of one sequence are averaged
            first, since they are not independent; several schemes or seeds give several values.
    """
    of_sequence: dict[Hashable, list[float]] = {}
    for sequence, before, after in pairs:
        of_sequence.setdefault(sequence, []).append(math.log(after / before))
    return Difference.of([math.fsum(values) / len(values) for values in of_sequence.values()])


def overall(verdicts: Sequence[str]) -> str:
    """Return the verdict over all cells, which decides whether a default may change.

    `BETTER` if most cells are better and none is worse, `WORSE` in the opposite case, `MIXED` if some are
    better and some worse, and otherwise `EQUAL`.
    """
    better, worse = verdicts.count(BETTER), verdicts.count(WORSE)
    if better and worse:
        return MIXED
    most = len(verdicts) / 2
    return BETTER if better > most else WORSE if worse > most else EQUAL


def counts(verdicts: Sequence[str]) -> Mapping[str, int]:
    """Return the numbers of better, equal and worse cells."""
    return {name: verdicts.count(name) for name in (BETTER, EQUAL, WORSE)}
