"""Multiple-choice knapsack: one option of each group, the smallest sum of losses within a size; exact, as a mixed-integer program.

    minimize    Σ_g Σ_o loss[g][o] · x[g,o]
    subject to  Σ_o x[g,o] = 1 for each group g,   Σ_g Σ_o size[g][o] · x[g,o] ≤ most,   x ∈ {0, 1}

Source: Kellerer, Pferschy, Pisinger, "Knapsack Problems", 2004, chapter 11. Solved by HiGHS, through ``scipy.optimize.milp``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import gcd
from typing import Any

import numpy as np

from quark.errors import ConfigError, UnsupportedError

__all__ = ["smallest_loss"]

_SPAN = 1e6
"""The difference between the largest and the smallest sum of losses, as the solver gets it: far above its absolute tolerance of 1e-6."""

Losses = Sequence[Sequence[float]]
Sizes = Sequence[Sequence[int]]


def smallest_loss(losses: Losses, sizes: Sizes, most: int) -> list[int]:
    """Return the number of the option to take of each group.

    Args:
        losses: Of each option of each group.
        sizes: Likewise, whole numbers of at least 0.
        most: The largest sum of sizes.

    Raises:
        ConfigError: Not even the smallest options fit.
        UnsupportedError: scipy is not installed.
    """
    kept = [_undominated(own, size) for own, size in zip(losses, sizes, strict=True)]
    least = sum(sizes[g][options[0]] for g, options in enumerate(kept))
    if least > most:
        raise ConfigError(f"the smallest options take {least:,} together, and {most:,} are allowed")
    # In units of all differences, above the smallest options: small whole numbers, which floating point adds exactly.
    extra = [[sizes[g][o] - sizes[g][options[0]] for o in options] for g, options in enumerate(kept)]
    unit = gcd(*(value for row in extra for value in row)) or 1
    room, span = (most - least) // unit, sum(losses[g][options[0]] - losses[g][options[-1]] for g, options in enumerate(kept))
    if sum(row[-1] for row in extra) // unit <= room:
        return [options[-1] for options in kept]
    costs = [[(losses[g][o] - losses[g][options[-1]]) * (_SPAN / span) for o in options] for g, options in enumerate(kept)]
    taken = _solved(costs, [[value // unit for value in row] for row in extra], room)
    return [options[o] for options, o in zip(kept, taken, strict=True)]


def _undominated(losses: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """Return the options of a group for which no smaller one has so small a loss, from the smallest to the largest."""
    kept: list[int] = []
    for option in sorted(range(len(sizes)), key=lambda o: (sizes[o], losses[o])):
        if not kept or losses[option] < losses[kept[-1]]:
            kept.append(option)
    return kept


def _solved(costs: Losses, weights: Sizes, room: int) -> list[int]:
    """Return the options of the smallest cost whose weights have room.

    The solver calls a number whole that is so to 1e-6. Where what it takes for a solution has no room, it is asked again with less.
    """
    for less in range(room + 1):
        taken = _milp(costs, weights, room - less)
        if sum(row[o] for row, o in zip(weights, taken, strict=True)) <= room:
            return taken
    raise AssertionError("the smallest options fit, so that some solution does")


def _milp(costs: Losses, weights: Sizes, room: int) -> list[int]:
    optimize, sparse = _scipy()
    groups = np.repeat(np.arange(len(costs)), [len(row) for row in costs])
    variables = np.arange(len(groups))
    one_each = sparse.csr_array((np.ones(len(groups)), (groups, variables)), shape=(len(costs), len(groups)))
    solution = optimize.milp(
        np.concatenate([np.asarray(row, dtype=np.float64) for row in costs]),
        integrality=np.ones(len(groups)),
        bounds=optimize.Bounds(0, 1),
        constraints=[
            optimize.LinearConstraint(one_each, 1, 1),
            optimize.LinearConstraint(np.concatenate([np.asarray(row, dtype=np.float64) for row in weights])[None], 0, room),
        ],
        options={"mip_rel_gap": 0},
    )
    if solution.x is None:
        raise RuntimeError(f"HiGHS finds no solution of a problem that has one: {solution.message}")
    starts = np.cumsum([0, *(len(row) for row in costs)])
    return [int(np.argmax(solution.x[a:b])) for a, b in pairwise(starts)]


def _scipy() -> tuple[Any, Any]:
    """Return ``scipy.optimize`` and ``scipy.sparse``, which nothing else here needs."""
    try:
        from scipy import optimize, sparse
    except ImportError:
        raise UnsupportedError(
            "mixed precision is solved by scipy (HiGHS), which is not installed: pip install 'quark-algos[mixed]'"
        ) from None
    return optimize, sparse
