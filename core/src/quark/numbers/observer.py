"""`Observer` collects the statistic from which the range of a tensor is computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Self

from torch import Tensor

from quark.config.tensor import QTensorConfig
from quark.errors import ConfigError
from quark.numbers.granularity import Granularity


class Observer(ABC):
    """Base class of observers. An observer collects a statistic of one tensor over any number of calls.

    Two observers of the same tensor can be merged. A merged observer returns the same range as one observer
    that has observed all tensors of both. A distributed run merges the observers of its ranks.

    Args:
        spec: The quantization spec of the tensor.
        granularity: Which elements share a range.

    Attributes:
        is_extremes: Whether the range reaches from the smallest to the largest value. For a spec without zero
            points, it then reaches from minus to plus the largest magnitude. If ``is_extremes`` is True,
            quark computes ranges itself, without an observer.
        options: The names of the observer's options. For each option, a class attribute with the option's
            name contains the default. Listings show the options, and `spec_error` refuses all other options.
    """

    is_extremes: ClassVar[bool] = False
    options: ClassVar[tuple[str, ...]] = ()

    def __init__(self, spec: QTensorConfig, granularity: Granularity) -> None:
        self.spec = spec
        self.granularity = granularity

    @classmethod
    def spec_error(cls, spec: QTensorConfig) -> str | None:
        """Return None if this observer supports the spec. Otherwise return an error message that says why
        not, and what to change."""
        return None

    @abstractmethod
    def observe(self, x: Tensor) -> None:
        """Update the statistic with a tensor of any float dtype.

        The observer must not keep a reference to the tensor.
        """

    @abstractmethod
    def range(self) -> tuple[Tensor, Tensor]:
        """Return the lower and the upper ends of the ranges.

        Both are float32 tensors in the granularity's scale shape.

        Raises:
            CalibrationError: The observer has observed no tensor.
        """

    @abstractmethod
    def merge(self, other: Observer) -> None:
        """Add the statistic of another observer of the same kind (`of_same_kind`)."""

    def of_same_kind(self, other: Observer) -> Self:
        """Check that ``other`` is an instance of this observer's class, and return ``other``.

        Raises:
            ConfigError: ``other`` has another class, so the two observers cannot be merged.
        """
        if not isinstance(other, type(self)):
            raise ConfigError(
                f"the ranges of a {type(self).__name__} and a {type(other).__name__} cannot be merged. Tensors that share a range, such "
                "as the inputs of the experts of one layer, need the same observer_cls"
            )
        return other
