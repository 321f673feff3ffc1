"""The Pareto curve: the smallest loss for each of several sizes, from the smallest choice to the largest."""

from __future__ import annotations

from collections.abc import Mapping

from quark_workbench.mixed_precision import CurvePoint
from quark_workbench.mixed_precision.by_sensitivity.knapsack import smallest_loss

__all__ = ["best_choice", "loss_of", "pareto_curve"]

Losses = Mapping[str, Mapping[str, float]]
Sizes = Mapping[str, Mapping[str, int]]


def best_choice(losses: Losses, sizes: Sizes, most: int) -> dict[str, str]:
    """Return the candidate of each group whose losses have the smallest sum, of all choices of at most so many bytes.

    Raises:
        ConfigError: There is none.
    """
    names = [list(sizes[group]) for group in losses]
    rows = list(zip(losses, names, strict=True))
    taken = smallest_loss(
        [[losses[group][name] for name in own] for group, own in rows], [[sizes[group][name] for name in own] for group, own in rows], most
    )
    return {group: own[option] for (group, own), option in zip(rows, taken, strict=True)}


def loss_of(losses: Losses, choices: Mapping[str, str]) -> float:
    """Return the sum of the losses of some choices."""
    return sum(losses[group][name] for group, name in choices.items())


def pareto_curve(losses: Losses, sizes: Sizes, points: int) -> tuple[CurvePoint, ...]:
    """Return points of the curve for sizes at equal distances, from the fewest bytes to the most; equal ones are one point.

    Args:
        losses: By group, then by candidate.
        sizes: Bytes, likewise.
        points: At most so many, at least 2.
    """
    low, high = (sum(chosen(own.values()) for own in sizes.values()) for chosen in (min, max))
    found: dict[int, CurvePoint] = {}
    for step in range(points):
        choices = best_choice(losses, sizes, low + (high - low) * step // (points - 1))
        total = sum(sizes[group][name] for group, name in choices.items())
        found.setdefault(total, CurvePoint(total, loss_of(losses, choices), choices))
    return tuple(found[total] for total in sorted(found))
