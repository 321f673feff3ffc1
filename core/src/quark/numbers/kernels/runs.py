"""Runs: how the elements that share a scale lie in memory."""

from __future__ import annotations

import attrs

__all__ = ["Runs"]


@attrs.frozen
class Runs:
    """How the elements that share a scale lie in a contiguous tensor: run r has scale number ``r // span · period + r % period``.

    Attributes:
        length: Elements of a run, next to each other.
        period: Runs until scales begin again, or go on to others.
        span: Runs after which they go on to others, a multiple of ``period``.
    """

    length: int
    period: int = 1
    span: int = 1

    @property
    def have_own_scales(self) -> bool:
        """Whether each run has a scale of its own, that of its number."""
        return self.period == self.span
