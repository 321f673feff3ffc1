"""Base of the observers that search one range per row of a weight, directly on the weight."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from quark.config.enums import QSchemeType
from quark.config.tensor import QTensorConfig
from quark.errors import CalibrationError
from quark.numbers import TILE_ELEMENTS, Granularity, Observer
from quark_schemes.observers.least_squares import Range
from quark_schemes.observers.options import granularity_error, options_error

__all__ = ["RowSearchObserver"]


class RowSearchObserver(Observer):
    """Searches one range per row when it observes a tensor.

    The tensor is not stored, so it can observe only one tensor, once.

    A histogram for each row, from which ranges of several tensors could be chosen, would be larger than the
    weight. Dynamic activations, which have a fresh observer each time, are served too. Merging with an
    observer that has seen nothing is exact.
    """

    qschemes: ClassVar[tuple[QSchemeType, ...]] = ()

    def __init__(self, spec: QTensorConfig, granularity: Granularity) -> None:
        super().__init__(spec, granularity)
        self._range: Range | None = None

    @classmethod
    def spec_error(cls, spec: QTensorConfig) -> str | None:
        if spec.qscheme not in cls.qschemes:
            return granularity_error(cls.__name__, spec, cls.qschemes)
        return options_error(cls.__name__, spec, cls.options)

    def observe(self, x: Tensor) -> None:
        """Search the ranges.

        Raises:
            CalibrationError: A tensor was observed before.
        """
        if x.numel() == 0:
            return
        if self._range is not None:
            raise self._seen_twice()
        shape = self.granularity.scale_shape(tuple(x.shape))
        rows = self.granularity.rows(x.detach())
        low, high = (torch.empty(rows.shape[0], dtype=torch.float32, device=rows.device) for _ in range(2))
        step = max(1, TILE_ELEMENTS // rows.shape[1])
        for top in range(0, rows.shape[0], step):
            part = slice(top, top + step)
            tile = rows[part].float()
            low[part], high[part] = self._search(tile, torch.amin(tile, dim=1), torch.amax(tile, dim=1))
        self._range = low.reshape(shape), high.reshape(shape)

    def range(self) -> tuple[Tensor, Tensor]:
        if self._range is None:
            raise CalibrationError("nothing was observed, so there is no range: run calibration data through the layer")
        return self._range

    def merge(self, other: Observer) -> None:
        """Take over the ranges of the other.

        Raises:
            CalibrationError: Both have observed a tensor.
        """
        ranges = self.of_same_kind(other)._range
        if self._range is not None and ranges is not None:
            raise self._seen_twice()
        self._range = self._range or ranges

    def _seen_twice(self) -> CalibrationError:
        return CalibrationError(
            f"{type(self).__name__} is for weights, which are seen once, and it was given a second tensor: "
            "use a min-max observer for static activations, or one range per tensor (PerTensorMSEObserver)"
        )

    @abstractmethod
    def _search(self, rows: Tensor, low: Tensor, high: Tensor) -> Range:
        """Return the range of each row of ``[rows, elements]``, float32; ``low`` and ``high`` are its extremes. NaN and Inf stay."""
