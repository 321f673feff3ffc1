"""Observer: collects the statistic that decides the range of a tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Self

from torch import Tensor

from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError
from quark.numbers.granularity import Granularity


class Observer(ABC):
    """Collects a statistic of one tensor over any number of calls.

    Two observers of the same tensor can be merged, with the same result as one observer of both data sets.
    The ranks of a run use this.

    Args:
        spec: The tensor's quantization.
        granularity: Which elements share a range.

    Attributes:
        is_extremes: Whether the range is just the smallest and the largest value, or ∓ the largest magnitude
            for a spec without zero points. Quark then computes ranges itself, without an observer.
        options: Names of the observer's options. Each has a class attribute of that name with the default.
            Listings show them; `spec_error` refuses others.
    """

    is_extremes: ClassVar[bool] = False
    options: ClassVar[tuple[str, ...]] = ()

    def __init__(self, spec: QTensorConfig, granularity: Granularity) -> None:
        self.spec = spec
        self.granularity = granularity

    @classmethod
    def spec_error(cls, spec: QTensorConfig) -> str | None:
        """Return why this observer cannot serve the spec, and the fix; None if it can."""
        return None

    @abstractmethod
    def observe(self, x: Tensor) -> None:
        """Update the statistic with a tensor of any float dtype; must keep no reference to it."""

    @abstractmethod
    def range(self) -> tuple[Tensor, Tensor]:
        """Return low and high, float32, in the granularity's scale shape.

        Raises:
            CalibrationError: Nothing was observed.
        """

    @abstractmethod
    def merge(self, other: Observer) -> None:
        """Add the statistic of another observer of the same kind (`of_same_kind`)."""

    def of_same_kind(self, other: Observer) -> Self:
        """Return ``other`` after a check that it has this observer's class.

        Raises:
            ConfigError: It has another class, so that the two cannot be merged.
        """
        if not isinstance(other, type(self)):
            raise ConfigError(
                f"the ranges of a {type(self).__name__} and a {type(other).__name__} cannot be merged. Tensors that share a range, such "
                "as the inputs of the experts of a mixture, need the same observer_cls"
            )
        return other
