"""Steps of weight conversion: what one tensor, or several, of a checkpoint become. Each has a step that undoes it.

Results are views wherever a view will do; only what joins tensors copies them. Source: the documented `weight_convert` interface, and the
conversion steps of transformers 5, whose arguments these share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quark.errors import ConfigError, UnsupportedError

Inputs = Mapping[str, Tensor | list[Tensor]]
"""Tensors by the pattern they were found under; a list where there is one for each expert."""


class ConversionOps(ABC):
    """One step of a conversion; third parties subclass it.

    Attributes:
        joins_experts: Whether each source stands for one tensor per expert, with the expert's number in its name.
    """

    joins_experts = False

    @abstractmethod
    def convert(self, input_dict: Inputs, source_patterns: list[str], target_patterns: list[str], **kwargs: Any) -> dict[str, Tensor]:
        """What the tensors become.

        Args:
            input_dict: By pattern, or as the step before has named them.
            source_patterns: Of the converter.
            target_patterns: Of the converter.
            **kwargs: None so far; accept what later versions may add.

        Returns:
            Tensors by what takes the pattern's place in the full name.

        Raises:
            ConfigError: (a ValueError) The tensors or patterns are not of the form that the step works on.
        """

    @property
    def reverse_op(self) -> ConversionOps:
        """The step that undoes this one.

        Raises:
            UnsupportedError: (a NotImplementedError) There is none.
        """
        raise UnsupportedError(
            f"{type(self).__name__} says of no step that undoes it: define its reverse_op, or convert in one direction only"
        )

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if value is not None)
        return f"{type(self).__name__}({settings})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).items()))


class Chunk(ConversionOps):
    """One tensor split along an axis, one part for each target, in order; the parts are views.

    Args:
        dim: The axis.
        sizes: Of the parts along it; None for equal ones.
    """

    def __init__(self, dim: int = 0, sizes: Sequence[int] | None = None) -> None:
        self.dim = dim
        self.sizes = None if sizes is None else tuple(sizes)

    def convert(self, input_dict: Inputs, source_patterns: list[str], target_patterns: list[str], **_: Any) -> dict[str, Tensor]:
        tensor, count = _only(input_dict, self), len(target_patterns)
        if count < 2:
            raise ConfigError(f"{self} splits a tensor and wants two targets or more, not {target_patterns}")
        length = tensor.shape[self.dim]
        sizes = self.sizes or (length // count,) * count
        if len(sizes) != count or sum(sizes) != length:
            raise ConfigError(f"{self} cannot split a tensor of the shape {list(tensor.shape)} into {count} parts: give fitting sizes")
        return dict(zip(target_patterns, tensor.split(sizes, dim=self.dim), strict=True))

    @property
    def reverse_op(self) -> ConversionOps:
        """Concatenation along the same axis."""
        return Concatenate(self.dim, self.sizes)


class Concatenate(ConversionOps):
    """Several tensors joined along an axis, in the order of the sources.

    Args:
        dim: The axis.
        sizes: Of the parts along it, without which parts of different sizes could not be had back; None for equal ones.
    """

    def __init__(self, dim: int = 0, sizes: Sequence[int] | None = None) -> None:
        self.dim = dim
        self.sizes = None if sizes is None else tuple(sizes)

    def convert(self, input_dict: Inputs, source_patterns: list[str], target_patterns: list[str], **_: Any) -> dict[str, Tensor]:
        if len(target_patterns) != 1:
            raise ConfigError(f"{self} makes one tensor and wants one target, not {target_patterns}")
        parts = [tensor for pattern in source_patterns for tensor in _listed(input_dict[pattern])]
        lengths = tuple(part.shape[self.dim] for part in parts)
        if self.sizes is not None and lengths != self.sizes:
            raise ConfigError(f"{self} was given parts of the sizes {list(lengths)}")
        if self.sizes is None and len(set(lengths)) > 1:
            raise ConfigError(f"{self} was given parts of different sizes, which it could not give back: say sizes={lengths}")
        return {target_patterns[0]: torch.cat(parts, dim=self.dim)}

    @property
    def reverse_op(self) -> ConversionOps:
        """The split along the same axis."""
        return Chunk(self.dim, self.sizes)


class Transpose(ConversionOps):
    """Two axes of each tensor exchanged; the results are views."""

    def __init__(self, dim0: int = 0, dim1: int = 1) -> None:
        self.dim0, self.dim1 = dim0, dim1

    def convert(self, input_dict: Inputs, source_patterns: list[str], target_patterns: list[str], **_: Any) -> dict[str, Tensor]:
        alone = len(input_dict) == 1 and len(target_patterns) == 1
        return {
            target_patterns[0] if alone and name in source_patterns else name: _tensor(value, self).transpose(self.dim0, self.dim1)
            for name, value in input_dict.items()
        }

    @property
    def reverse_op(self) -> ConversionOps:
        """The same exchange."""
        return Transpose(self.dim0, self.dim1)


class SplitFusedExperts(ConversionOps):
    """The tensor of all experts ``[E, …]`` taken apart, one tensor for each expert and target; the results are views.

    The expert's number goes where a target has a star, or before the target: ``gate_proj.weight`` becomes ``3.gate_proj.weight``.

    Args:
        split_axis: Axis of one expert's tensor along which two targets lie, the first half of it and the second.
        ndim: Axes of the tensor of all: 3 for matrices, 2 for biases.
    """

    def __init__(self, split_axis: int = 0, ndim: int = 3) -> None:
        self.split_axis, self.ndim = split_axis, ndim

    def convert(self, input_dict: Inputs, source_patterns: list[str], target_patterns: list[str], **_: Any) -> dict[str, Tensor]:
        fused, count = _only(input_dict, self), len(target_patterns)
        if fused.ndim != self.ndim:
            raise ConfigError(f"{self} wants a tensor of {self.ndim} axes, experts first, not one of the shape {list(fused.shape)}")
        axis = _split_axis(self, count)
        if fused.shape[axis] % count:
            raise ConfigError(f"{self} cannot halve a tensor of the shape {list(fused.shape)} along its axis {axis}")
        parts = [part.unbind() for part in fused.chunk(count, dim=axis)]
        return {numbered(target, i): part[i] for i in range(fused.shape[0]) for target, part in zip(target_patterns, parts, strict=True)}

    @property
    def reverse_op(self) -> ConversionOps:
        """All experts in one tensor again."""
        return FuseExperts(self.split_axis, self.ndim)


class FuseExperts(ConversionOps):
    """The tensors of single experts put into one, ``[E, …]``: what undoes `SplitFusedExperts`, with the same arguments."""

    joins_experts = True

    def __init__(self, split_axis: int = 0, ndim: int = 3) -> None:
        self.split_axis, self.ndim = split_axis, ndim

    def convert(self, input_dict: Inputs, source_patterns: list[str], target_patterns: list[str], **_: Any) -> dict[str, Tensor]:
        if len(target_patterns) != 1:
            raise ConfigError(f"{self} makes one tensor and wants one target, not {target_patterns}")
        axis = _split_axis(self, len(source_patterns))
        stacked = [torch.stack(_listed(input_dict[pattern])) for pattern in source_patterns]
        if stacked[0].ndim != self.ndim or len({part.shape for part in stacked}) > 1:
            shapes = [list(part.shape) for part in stacked]
            raise ConfigError(f"{self} wants tensors of one shape that make one of {self.ndim} axes, not {shapes}")
        return {target_patterns[0]: stacked[0] if len(stacked) == 1 else torch.cat(stacked, dim=axis)}

    @property
    def reverse_op(self) -> ConversionOps:
        """The experts taken apart."""
        return SplitFusedExperts(self.split_axis, self.ndim)


def numbered(pattern: str, index: int) -> str:
    """A pattern with an expert's number in it: at its star, or before it."""
    return pattern.replace("*", str(index), 1) if "*" in pattern else f"{index}.{pattern}"


def _split_axis(step: SplitFusedExperts | FuseExperts, count: int) -> int:
    """The axis of the tensor of all experts along which ``count`` patterns lie."""
    if count not in (1, 2):
        raise ConfigError(f"{step} knows one or two matrices per expert, not {count}")
    inner = step.ndim - 1
    if not -inner <= step.split_axis < inner:
        raise ConfigError(f"{step}: the tensor of one expert has {inner} axes, split_axis is out of range")
    return step.split_axis % inner + 1


def _listed(value: Tensor | list[Tensor]) -> list[Tensor]:
    return value if isinstance(value, list) else [value]


def _tensor(value: Tensor | list[Tensor], step: ConversionOps) -> Tensor:
    found = _listed(value)
    if len(found) != 1:
        raise ConfigError(f"{step} works on one tensor and was given {len(found)}: let a step that joins them go before")
    return found[0]


def _only(input_dict: Inputs, step: ConversionOps) -> Tensor:
    if len(input_dict) != 1:
        raise ConfigError(f"{step} works on one tensor and was given {sorted(input_dict)}: let a step that joins them go before")
    return _tensor(next(iter(input_dict.values())), step)
