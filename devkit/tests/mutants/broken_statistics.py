"""Statistics with one thing wrong each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quark.algorithms import Statistic

__all__ = ["FirstBatch", "ForgetsTokens", "KeepsInputs", "LastPart", "MeanOfBatches", "MeanOfTwo"]


class LastPart(Statistic):
    """Remembers the tokens of its last part only, in merging."""

    def __init__(self, columns: int, device: torch.device) -> None:
        super().__init__(columns, device)
        self.largest = torch.zeros(columns)

    def accumulate(self, x: Tensor, reference: Tensor | None) -> None:
        self.largest = torch.maximum(self.largest, x.abs().amax(0).float())

    def add(self, other: LastPart) -> None:
        self.largest = other.largest


class ForgetsTokens(LastPart):
    def merge(self, other: Any) -> None:
        self.largest = torch.maximum(self.largest, other.largest)


class KeepsInputs(LastPart):
    def accumulate(self, x: Tensor, reference: Tensor | None) -> None:
        self.kept = x

    @property
    def largest(self) -> Tensor:
        return self.kept.abs().amax(0)

    @largest.setter
    def largest(self, value: Tensor) -> None:
        pass


class Largest(LastPart):
    def add(self, other: LastPart) -> None:
        self.largest = torch.maximum(self.largest, other.largest)


class FirstBatch(Largest):
    """Looks at its first batch alone."""

    def accumulate(self, x: Tensor, reference: Tensor | None) -> None:
        if not bool(self.largest.any()):
            super().accumulate(x, reference)


class MeanOfTwo(Largest):
    """Takes the mean in merging, which weighs the last part most."""

    def add(self, other: LastPart) -> None:
        self.largest = (self.largest + other.largest) / 2


class MeanOfBatches(Largest):
    """Adds the mean of each batch, whatever its size, and says nothing of it by a public name."""

    def accumulate(self, x: Tensor, reference: Tensor | None) -> None:
        self._sum = getattr(self, "_sum", 0) + x.abs().mean(0).float()

    def add(self, other: Any) -> None:
        self._sum += other._sum

    @property
    def largest(self) -> Tensor:
        return self._sum

    @largest.setter
    def largest(self, value: Tensor) -> None:
        pass
