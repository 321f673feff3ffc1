"""GroupScales: the scales of groups of input channels, for every row of stacked weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

__all__ = ["GroupScales"]


@attrs.frozen(eq=False)
class GroupScales:
    """Scales of groups of input channels, for every row (output channel).

    Attributes:
        scale: What codes are multiplied by, float32, outer scales included: ``[groups, N]``, or ``[K, N]``
            where elements differ.
        inverse: Its reciprocal, for formats that multiply by it; else None.
        zero: Zero points, ``[groups, N]``, or None.
        stored: As `QParams.scale` holds them, ``[groups, N]``.
    """

    scale: Tensor
    inverse: Tensor | None
    zero: Tensor | None
    stored: Tensor

    def at(self, group: int) -> GroupScales:
        """Return the scales of one group, each ``[N]``."""
        return self.map(lambda x: x[group])

    def of_rows(self, rows: slice) -> GroupScales:
        """Return the scales of some rows."""
        return self.map(lambda x: x[:, rows])

    def expanded(self, size: int) -> GroupScales:
        """Return one row for each input channel of groups of that size."""
        return self.map(lambda x: x.repeat_interleave(size, 0))

    def where(self, better: Tensor, other: GroupScales) -> GroupScales:
        """Return ``torch.where(better, other, self)`` for every field; ``better`` is ``[groups, N]``; neither may differ within groups."""
        return _with_all([self, other], lambda parts: torch.where(better, parts[1], parts[0]))

    @staticmethod
    def joined(parts: Sequence[GroupScales]) -> GroupScales:
        """Concatenate the scales of consecutive groups."""
        return _with_all(parts, torch.cat)

    @staticmethod
    def beside(parts: Sequence[GroupScales]) -> GroupScales:
        """Concatenate the scales of the same groups for consecutive rows."""
        return _with_all(parts, lambda fields: torch.cat(fields, 1))

    def map(self, change: Callable[[Tensor], Tensor]) -> GroupScales:
        """Return the same with ``change`` applied to every tensor."""
        return _with_all([self], lambda parts: change(parts[0]))


def _with_all(parts: Sequence[GroupScales], change: Callable[[Any], Tensor]) -> GroupScales:
    """Group scales whose fields are ``change`` of the list of that field in all parts; a field that is None stays None."""

    def changed(name: str) -> Any:
        fields = [getattr(p, name) for p in parts]
        return None if fields[0] is None else change(fields)

    return GroupScales(**{a.name: changed(a.name) for a in attrs.fields(GroupScales)})
