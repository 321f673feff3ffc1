"""RMSObserver: computes a symmetric range. Its limit is the root mean square of the values that share a
scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quark.config.tensor import QTensorConfig
from quark.errors import CalibrationError
from quark.numbers import Granularity, Observer

__all__ = ["RMSObserver"]


class RMSObserver(Observer):
    """Computes a symmetric range whose limit is the root mean square of the observed values.

    Outliers may be outside the range, because a codebook has entries for them.
    """

    def __init__(self, spec: QTensorConfig, granularity: Granularity) -> None:
        super().__init__(spec, granularity)
        self._sum: Tensor | None = None
        self._count = 0

    @classmethod
    def spec_error(cls, spec: QTensorConfig) -> str | None:
        options = dict(spec.observer_options)
        return f"RMSObserver has no option {min(options)!r}: leave observer_options out" if options else None

    def observe(self, x: Tensor) -> None:
        if x.numel() == 0:
            return
        rows = self.granularity.rows(x.detach().double())
        squares = rows.square().sum(1).reshape(self.granularity.scale_shape(tuple(x.shape)))
        self._sum = squares if self._sum is None else self._sum + squares
        self._count += rows.shape[1]

    def range(self) -> tuple[Tensor, Tensor]:
        if self._sum is None:
            raise CalibrationError("an RMSObserver has observed no values. Quantize the model with calibration data")
        root = (self._sum / self._count).sqrt().to(torch.float32)
        return -root, root

    def merge(self, other: Observer) -> None:
        other = self.of_same_kind(other)
        if other._sum is not None:
            self._sum = other._sum if self._sum is None else self._sum + other._sum
            self._count += other._count
