"""Observer: what of the data it sees decides the range of a tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Self

from torch import Tensor

from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError
from quark.quantizers.granularity import Granularity


class Observer(ABC):
    """Collects a statistic of one tensor over any number of calls.

    Two observers of the same tensor can be merged: merging equals having seen both data sets, so ranks can reduce.

    Args:
        spec: The tensor's quantization.
        granularity: Which elements share a range.

    Attributes:
        is_extremes: Whether the range of one tensor is just its smallest and its largest value.
    """

    is_extremes: ClassVar[bool] = False

    def __init__(self, spec: QTensorConfig, granularity: Granularity) -> None:
        self.spec = spec
        self.granularity = granularity

    @classmethod
    def spec_error(cls, spec: QTensorConfig) -> str | None:
        """Why this observer cannot serve the spec, with the cure, or None."""
        return None

    @abstractmethod
    def observe(self, x: Tensor) -> None:
        """Take in one tensor, of any float dtype; nothing of it is kept alive."""

    @abstractmethod
    def range(self) -> tuple[Tensor, Tensor]:
        """Low and high, float32, in the granularity's scale shape.

        Raises:
            CalibrationError: Nothing was observed.
        """

    @abstractmethod
    def merge(self, other: Observer) -> None:
        """Take in what another observer of the same kind has seen (`of_same_kind`)."""

    def of_same_kind(self, other: Observer) -> Self:
        """``other``, known to be of this observer's class.

        Raises:
            ConfigError: It is of another, so that what the two have seen cannot be merged.
        """
        if not isinstance(other, type(self)):
            raise ConfigError(
                f"what a {type(self).__name__} and a {type(other).__name__} have seen cannot be merged, and tensors that share a range, "
                "such as the inputs of the experts of a mixture, need that: give them one observer_cls"
            )
        return other
