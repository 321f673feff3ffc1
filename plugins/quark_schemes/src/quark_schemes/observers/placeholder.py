"""PlaceholderObserver: observes nothing, for formats that need no range."""

from __future__ import annotations

import torch
from torch import Tensor

from quark.quantizers import Observer

__all__ = ["PlaceholderObserver"]


class PlaceholderObserver(Observer):
    """Observer of formats that only cast."""

    def observe(self, x: Tensor) -> None:
        """Do nothing."""

    def range(self) -> tuple[Tensor, Tensor]:
        """Return an empty range."""
        return torch.zeros(()), torch.zeros(())

    def merge(self, other: Observer) -> None:
        """Do nothing."""
