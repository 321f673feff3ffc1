"""SampleGrid: decides which calibration calls a rank runs.

Sums: adds up the statistics of a layer's input over calls and ranks.

The calls of a run are divided into at most `CELLS` cells. The cells do not depend on the number of ranks. A
cell has consecutive calls, and each rank runs consecutive cells. In a deterministic run, the cells are the
leaves of a binary tree, and statistics are merged along this tree. So the order of additions is the same for
any number of ranks, and the sum has the same bits. A subtree is complete on a rank if the rank has run all
its cells. Each rank sends the sums of its largest complete subtrees to the other ranks. If the number of
ranks is a power of two, each rank has one such subtree. In runs that are not deterministic, each rank has one
sum of its calls, and these sums are added in any order.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from quark.algorithms import Statistic
from quark.base.ranks import ALONE, Ranks

CELLS = 64
"""Number of cells of a grid, a power of two. In a deterministic run, at most this many ranks run calls, and
at most 7 sums per input are in memory at a time.
"""


@attrs.frozen(eq=False)
class SampleGrid:
    """Divides the calls of a run among its ranks.

    Attributes:
        calls: Number of calls.
        ranks: The ranks.
    """

    calls: int
    ranks: Ranks = ALONE

    @property
    def own(self) -> slice:
        """The indices of the calls that this rank runs."""
        if not self.ranks.is_deterministic:
            return self.ranks.part(self.calls)
        cells = self.own_cells
        inside = [number for number in range(self.calls) if cells.start <= self.cell(number) < cells.stop]
        return slice(inside[0], inside[-1] + 1) if inside else slice(0, 0)

    @property
    def own_cells(self) -> slice:
        """The indices of the cells that this rank runs in a deterministic run."""
        used = min(CELLS, self.calls)
        part = self.ranks.part(used)
        return slice(part.start, CELLS if part.stop == used else part.stop)

    def cell(self, call: int) -> int:
        """Return the index of the cell that contains the call with the index ``call``."""
        return call * min(CELLS, self.calls) // max(self.calls, 1)


@attrs.frozen(eq=False)
class _Subtree:
    """Statistics of ``size`` consecutive cells. ``start`` is the number of the first cell.

    ``size`` is a power of two, and ``start`` is a multiple of ``size``.
    """

    start: int
    size: int
    statistics: dict[type[Statistic], Statistic]


class Sums:
    """Collects statistics of one input over this rank's calls. `of_all_ranks` returns the statistics over all
    calls.

    Args:
        kinds: Classes of the statistics.
        columns: K, the number of input channels.
        device: Device of the inputs.
        grid: The calls, divided among the ranks.
        outputs: N, the number of outputs, if statistics of inputs are replaced by statistics of outputs
            (`Statistic.of_outputs`). Otherwise None.
        inputs_last: As in `Statistic`.
    """

    def __init__(
        self,
        kinds: Sequence[type[Statistic]],
        columns: int,
        device: torch.device,
        grid: SampleGrid,
        *,
        outputs: int | None = None,
        inputs_last: bool = False,
    ) -> None:
        self._kinds = kinds
        self._outputs = outputs
        self._columns = columns
        self._device = device
        self._grid = grid
        self._inputs_last = inputs_last
        self._cell = -1
        self._statistics = self._new()
        self._subtrees: list[_Subtree] = []

    def update(self, x: Tensor, reference: Tensor | None, call: int, one_in: int = 1) -> None:
        """Add tokens of a call to the statistics. Calls must be added in ascending order.

        Args:
            x, reference: As in `Statistic.update`.
            call: Number of the call.
            one_in: The number n if ``x`` has only every n-th token of the call. It is 1 if ``x`` has all
                tokens.
        """
        if self._grid.ranks.is_deterministic and (cell := self._grid.cell(call)) != self._cell:
            self._end_cell(cell)
            self._cell = cell
        for statistic in self._statistics.values():
            step = max(1, statistic.one_in // one_in)
            statistic.update(x[::step], None if reference is None else reference[::step])

    def of_all_ranks(self) -> dict[type[Statistic], Statistic]:
        """Return the statistics of the calls of all ranks, as a dictionary from class to statistic.

        Every rank must call this method exactly once.
        """
        ranks = self._grid.ranks
        if not ranks.is_deterministic:
            return {kind: statistic.of_all_ranks(ranks) for kind, statistic in self._statistics.items()}
        self._end_cell(self._grid.own_cells.stop)
        subtrees = [subtree for each in ranks.gather(self._subtrees) for subtree in each]
        whole = _joined(subtrees, 0, CELLS)
        return whole[0].statistics if whole else self._new()

    def _end_cell(self, next_cell: int) -> None:
        """Store the statistics of the cell that has ended, and merge the subtrees that are complete.

        A subtree is complete if all its cells are before ``next_cell``.
        """
        if self._cell >= 0:
            self._subtrees.append(_Subtree(self._cell, 1, self._statistics))
            self._statistics = self._new()
        self._subtrees = _joined(self._subtrees, self._grid.own_cells.start, next_cell)
        self._cell = -1

    def _new(self) -> dict[type[Statistic], Statistic]:
        statistics: dict[type[Statistic], Statistic] = {}
        for kind in self._kinds:
            if self._outputs is None or kind.of_outputs is None:
                statistics[kind] = kind(self._columns, self._device)
            else:
                statistics[kind.of_outputs] = kind.of_outputs(self._columns, self._device, self._outputs)
        for statistic in statistics.values():
            statistic.inputs_last = self._inputs_last
        return statistics


def _joined(subtrees: Sequence[_Subtree], start: int, stop: int) -> list[_Subtree]:
    """Merge sibling subtrees whose parent has only cells from ``start`` up to, but not including, ``stop``.

    Return the resulting subtrees in order. A subtree without tokens may be missing. The parent then gets the
    statistics of the missing subtree's sibling.
    """
    joined = list(subtrees)
    size = 1
    while size < CELLS:
        level, joined = joined, []
        for subtree in level:
            parent = subtree.start // (2 * size) * (2 * size)
            if subtree.size != size or parent < start or parent + 2 * size > stop:
                joined.append(subtree)
            elif joined and joined[-1].start == parent and joined[-1].size == 2 * size:
                for kind, statistic in joined[-1].statistics.items():
                    statistic.merge(subtree.statistics[kind])
            else:
                joined.append(_Subtree(parent, 2 * size, subtree.statistics))
        size *= 2
    return joined
