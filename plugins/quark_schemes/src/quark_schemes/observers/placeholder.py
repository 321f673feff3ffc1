"""PlaceholderObserver: observes nothing, for formats that need no range."""

from __future__ import annotations

import torch
from torch import Tensor

from quark.config.tensor import QTensorConfig
from quark.numbers import Observer, number_format
from quark_schemes.observers.options import options_error

__all__ = ["PlaceholderObserver"]


class PlaceholderObserver(Observer):
    """Observer of formats that only cast."""

    @classmethod
    def spec_error(cls, spec: QTensorConfig) -> str | None:
        if not number_format(spec.dtype).is_cast:
            return f"{cls.__name__} observes nothing, and the scales of {spec.dtype.name} come from a range: use MinMaxObserver"
        return options_error(cls.__name__, spec, cls.options)

    def observe(self, x: Tensor) -> None:
        """Do nothing."""

    def range(self) -> tuple[Tensor, Tensor]:
        """Return an empty range."""
        return torch.zeros(()), torch.zeros(())

    def merge(self, other: Observer) -> None:
        """Do nothing."""
