"""A statistic that keeps the tokens, so that a test can look at the inputs of a rounding or a transform."""

from __future__ import annotations

import torch
from torch import Tensor

from quark.algorithms import Statistic


class Inputs(Statistic):
    """Keeps the tokens themselves."""

    def __init__(self, columns: int, device: torch.device) -> None:
        super().__init__(columns, device)
        self.seen: list[Tensor] = []

    def accumulate(self, x: Tensor, reference: Tensor | None) -> None:
        self.seen.append(x.clone())

    def add(self, other: Inputs) -> None:
        self.seen += other.seen
