"""TimeLeft: how long the rest of a run will take, by the rate of what it has done so far."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["TimeLeft"]


class TimeLeft:
    """Measures the rate of work, and what is left of it.

    Args:
        work: Of each piece, in any unit, such as the bytes of a block; 0 for a piece that is not worked on
            here.

    Example:
        >>> left = TimeLeft([10, 30, 30])
        >>> left.seconds
        >>> left.finish(0, seconds=2.0)
        >>> left.seconds                    # 60 units at 5 a second
        12.0
    """

    def __init__(self, work: Sequence[float]) -> None:
        self._work = list(work)
        self._done = 0.0
        self._took = 0.0
        self._left = float(sum(self._work))

    def finish(self, number: int, seconds: float) -> None:
        """Count a piece, 0 for the first, as done in so many seconds; one without work says nothing of the rate."""
        if self._work[number] > 0:
            self._done += self._work[number]
            self._took += seconds
            self._left -= self._work[number]

    @property
    def seconds(self) -> float | None:
        """How long the other pieces will take; None before the first piece with work is done."""
        return self._took * max(self._left, 0.0) / self._done if self._done else None
