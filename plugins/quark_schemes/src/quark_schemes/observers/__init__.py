"""Observers, with one file for each family.

This file has the base class of the observers. The base class refuses specs that an observer does not support.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from quark.config.enums import QSchemeType
from quark.config.tensor import QTensorConfig
from quark.errors import CalibrationError
from quark.numbers import Granularity, Observer, format_of, quantizer_for

__all__ = ["ServingObserver"]


class ServingObserver(Observer):
    """Base class of the observers in this package.

    You can also use an observer without a quantizer, as in AMD Quark: create it from a spec, call it with
    tensors, and compute the scales.

    Args:
        spec: The quantization (see `quark.numbers.Observer`). If ``granularity`` is None or a device, the
            spec must have a granularity that the observer supports.
        granularity: Which elements share a range. With None or a device, the granularity of the spec.

    Attributes:
        qschemes: The supported granularities; empty if the observer supports all granularities.

    Example:
        >>> from quark_schemes.observers.min_max import PerTensorMinMaxObserver
        >>> fields = {"qscheme": "per_tensor", "symmetric": True, "is_dynamic": False}
        >>> spec = QTensorConfig(dtype="int8", observer_cls="PerTensorMinMaxObserver", **fields)
        >>> observer = PerTensorMinMaxObserver(spec)
        >>> x = observer(torch.tensor([-2.0, 1.0]))
        >>> observer.calculate_qparams(*observer.range())
        (tensor(0.0157), tensor(0, dtype=torch.int32))
    """

    qschemes: ClassVar[tuple[QSchemeType, ...]] = ()

    def __init__(self, spec: QTensorConfig, granularity: Granularity | torch.device | str | None = None) -> None:
        if not isinstance(granularity, Granularity):
            level = quantizer_for(spec, activation=False).stored_level
            spec, granularity = level.spec, level.granularity
        super().__init__(spec, granularity)

    def __call__(self, x: Tensor) -> Tensor:
        """Observe the tensor ``x``, and return it unchanged."""
        self.observe(x)
        return x

    forward = __call__

    def calculate_qparams(self, min_val: Tensor, max_val: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scales and zero points for the ranges from ``min_val`` to ``max_val``.

        The zero points are 0 if the format has no zero points.
        """
        qparams = format_of(self.spec).qparams(min_val.float(), max_val.float(), self.spec)
        zero = qparams.zero_point
        return qparams.scale, torch.zeros_like(qparams.scale, dtype=torch.int32) if zero is None else zero

    def _calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Return the scales and zero points for the data observed so far.

        The method has this name because AMD Quark calls it.
        """
        return self.calculate_qparams(*self.range())

    @classmethod
    def spec_error(cls, spec: QTensorConfig) -> str | None:
        if cls.qschemes and spec.qscheme not in cls.qschemes:
            asked = spec.qscheme and spec.qscheme.name
            fix = f"leave observer_cls out to use the default of {spec.dtype.name}, or name an observer for {asked}"
            return f"{cls.__name__} supports {' or '.join(qscheme.name for qscheme in cls.qschemes)}, not {asked}: {fix}"
        unknown = [name for name, _ in spec.observer_options if name not in cls.options]
        if not unknown:
            return None
        fix = f"its options are {', '.join(cls.options)}" if cls.options else "leave observer_options out"
        return f"{cls.__name__} has no option {', '.join(map(repr, unknown))}: {fix}"

    @staticmethod
    def nothing_observed() -> CalibrationError:
        """Return the error for a range that is requested before the observer has observed data."""
        return CalibrationError("the observer has seen no data, so there is no range: run calibration data through the layer")
