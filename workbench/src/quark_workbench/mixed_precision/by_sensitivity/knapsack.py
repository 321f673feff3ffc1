"""Multiple-choice knapsack: choose one option per group, with the least total loss within a total size.

    minimize    Σ_g loss[g][o_g]
    subject to  Σ_g size[g][o_g] ≤ most

Dynamic programming adds one group after the other. It drops each partial sum if another partial sum is
smaller in both size and loss. A bound makes this fast: with a price λ per byte, the remaining groups cost at
least ``Σ_g min_o (loss + λ size)``. A partial sum is dropped if, with this bound, it cannot be better than a
solution that is known. λ and the known solution come from the linear relaxation, which starts from the
smallest options and then takes the steps to larger options that save the most loss per byte. Few partial sums
remain, since the relaxation differs from a solution in only one group.

All sizes are integers, so the result is exact to the byte. Solvers of mixed-integer programs are not: their
relative tolerance is hundreds of bytes for a gigabyte. Source: Kellerer, Pferschy, Pisinger, "Knapsack
Problems", 2004, sections 11.2 (relaxation) and 11.5 (dynamic programming with bounds).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor

from quark.errors import ConfigError
from quark_workbench.mixed_precision import CurvePoint

__all__ = ["best_choice", "loss_of", "pareto_curve", "smallest_loss"]

_ROUNDING = 1e-12
"""Rounding error of bounds, as a share of the sum of all losses."""

Losses = Mapping[str, Mapping[str, float]]
Sizes = Mapping[str, Mapping[str, int]]


def smallest_loss(losses: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]], most: int) -> list[int]:
    """Return the indices of the options, one for each group, whose sum of losses is smallest.

    Args:
        losses: For each group, the losses of its options.
        sizes: For each group, the sizes of its options, which are integers of at least 0.
        most: The largest allowed sum of sizes.

    Raises:
        ConfigError: Not even the smallest options fit.
    """
    groups = [_Group.of(own, size) for own, size in zip(losses, sizes, strict=True)]
    least = sum(min(size) for size in sizes)
    if least > most:
        raise ConfigError(f"the smallest options have the total size {least:,}, but at most {most:,} is allowed")
    known, price = _relaxed(groups, most - least)
    taken = _better(groups, most - least, known, price)
    return [group.options[o] for group, o in zip(groups, taken, strict=True)]


@attrs.frozen(eq=False)
class _Group:
    """Those options of a group that the best solution may contain, in ascending order of size.

    Attributes:
        options: Indices of the options in the group.
        extra: For each option, its size minus the smallest size.
        losses: The losses of the options, which are in descending order.
    """

    options: list[int]
    extra: list[int]
    losses: list[float]

    @classmethod
    def of(cls, losses: Sequence[float], sizes: Sequence[int]) -> _Group:
        """Return a group without the options whose loss a smaller option reaches."""
        kept: list[int] = []
        for option in sorted(range(len(sizes)), key=lambda o: (sizes[o], losses[o])):
            if not kept or losses[option] < losses[kept[-1]]:
                kept.append(option)
        return cls(kept, [sizes[o] - sizes[kept[0]] for o in kept], [losses[o] for o in kept])

    def steps(self) -> list[tuple[float, int, int]]:
        """Return the steps between neighbouring options on the lower convex hull of losses over sizes.

        A step is a tuple: the loss saved per byte, and the positions of the smaller and the larger option.
        The step that saves most is first.
        """
        steps, at = [], 0
        while at < len(self.options) - 1:
            saved = {o: (self.losses[at] - self.losses[o]) / (self.extra[o] - self.extra[at]) for o in range(at + 1, len(self.options))}
            best = max(saved, key=lambda o: (saved[o], o))
            steps.append((saved[best], at, best))
            at = best
        return steps


def _relaxed(groups: Sequence[_Group], room: int) -> tuple[list[int], float]:
    """Return a good solution, as an option for each group, and a price per byte.

    The solution takes the steps that save the most loss per byte, as far as they fit in ``room``. The price
    is the loss saved per byte in the first step that does not fit, or 0 if all steps fit.
    """
    taken, price = [0] * len(groups), 0.0
    for saved, g, start, end in sorted(((s, g, a, b) for g, group in enumerate(groups) for s, a, b in group.steps()), reverse=True):
        size = groups[g].extra[end] - groups[g].extra[start]
        if size <= room and taken[g] == start:
            taken[g], room = end, room - size
        elif not price:
            price = saved  # the relaxation takes a part of this step
    return taken, price


def _better(groups: Sequence[_Group], room: int, known: Sequence[int], price: float) -> list[int]:
    """Return the options of the best solution, or ``known`` if no solution is better than ``known``."""
    best = sum(group.losses[o] for group, o in zip(groups, known, strict=True))
    margin = _ROUNDING * sum(abs(group.losses[0]) for group in groups)
    cheapest = [min(loss + price * extra for loss, extra in zip(group.losses, group.extra, strict=True)) for group in groups]
    left = sum(cheapest) - price * room
    size, loss = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
    trail: list[tuple[Tensor, Tensor]] = []
    for group, own in zip(groups, cheapest, strict=True):
        left -= own
        sizes = (size[:, None] + torch.tensor(group.extra)).flatten()
        losses = (loss[:, None] + torch.tensor(group.losses, dtype=torch.float64)).flatten()
        hopeful = ((sizes <= room) & (losses + price * sizes + left <= best + margin)).nonzero()[:, 0]
        kept = hopeful[_undominated(sizes[hopeful], losses[hopeful])]
        if not len(kept):
            return list(known)
        size, loss = sizes[kept], losses[kept]
        trail.append((kept // len(group.options), kept % len(group.options)))
    at = int(loss.argmin()) if len(loss) else 0
    if not trail or float(loss[at]) >= best:
        return list(known)
    taken = []
    for before, option in reversed(trail):
        taken.append(int(option[at]))
        at = int(before[at])
    return taken[::-1]


def _undominated(sizes: Tensor, losses: Tensor) -> Tensor:
    """Return the positions of the sums whose loss no smaller sum reaches, in ascending order of size."""
    order = losses.argsort(stable=True)
    order = order[sizes[order].argsort(stable=True)]  # by size; equal sizes by loss
    sorted_losses = losses[order]
    least = sorted_losses.cummin(0).values
    falls = torch.ones(len(order), dtype=torch.bool)
    falls[1:] = sorted_losses[1:] < least[:-1]
    return order[falls]


def best_choice(losses: Losses, sizes: Sizes, most: int) -> dict[str, str]:
    """Choose a candidate for each group so that the sum of losses is smallest within ``most`` bytes.

    Return a dictionary from group to candidate.

    Raises:
        ConfigError: Not even the smallest candidates fit.
    """
    groups = {group: list(sizes[group]) for group in losses}
    loss_rows = [[losses[group][name] for name in names] for group, names in groups.items()]
    taken = smallest_loss(loss_rows, [list(sizes[group].values()) for group in losses], most)
    return {group: names[option] for (group, names), option in zip(groups.items(), taken, strict=True)}


def loss_of(losses: Losses, choices: Mapping[str, str]) -> float:
    """Return the sum of the losses of the chosen candidates."""
    return sum(losses[group][name] for group, name in choices.items())


def pareto_curve(losses: Losses, sizes: Sizes, points: int) -> tuple[CurvePoint, ...]:
    """Return points of the Pareto curve of loss over size, in ascending order of size.

    The sizes at which the best choice is computed are equally spaced. Equal choices give one point.

    Args:
        losses: For each group, a dictionary from candidate to loss.
        sizes: For each group, a dictionary from candidate to bytes.
        points: Largest number of points, at least 2.
    """
    low, high = (sum(chosen(own.values()) for own in sizes.values()) for chosen in (min, max))
    found: dict[int, CurvePoint] = {}
    for step in range(points):
        choices = best_choice(losses, sizes, low + (high - low) * step // (points - 1))
        total = sum(sizes[group][name] for group, name in choices.items())
        found.setdefault(total, CurvePoint(total, loss_of(losses, choices), choices))
    return tuple(found[total] for total in sorted(found))
