"""Operations of weight converters: split, join, transpose, and separate or fuse experts.

Each has a reverse operation.

Results are views where possible; only operations that join tensors copy. The classes are those of AMD Quark's
``weight_convert``, whose arguments they share with the operations of transformers 5.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quark.errors import ConfigError, UnsupportedError

__all__ = ["Chunk", "Concatenate", "ConversionOps", "FuseExperts", "Inputs", "SplitFusedExperts", "Transpose", "numbered"]

Inputs = Mapping[str, Tensor | list[Tensor]]
"""Tensors by the pattern that matched their name; a list in the order of experts where there is one per
expert.
"""


class ConversionOps(ABC):
    """One operation of a weight converter; subclass it to add one.

    Attributes:
        joins_experts: Whether each source pattern stands for one tensor per expert, with the expert's number
            in its name.
    """

    joins_experts = False

    @abstractmethod
    def convert(self, input_dict: Inputs, source_patterns: list[str], target_patterns: list[str], **kwargs: Any) -> dict[str, Tensor]:
        """Return the results, by the name that replaces the pattern in the full name.

        Args:
            input_dict: Tensors by source pattern, or by the names that the operation before gave them.
            source_patterns: Source patterns of the converter.
            target_patterns: Target patterns of the converter.
            **kwargs: None so far; accept what later versions may add.

        Returns:
            Tensors by name, such as ``"3.up_proj.weight"``.

        Raises:
            ConfigError: (a ValueError) The tensors or patterns do not fit the operation.
        """

    @property
    def reverse_op(self) -> ConversionOps:
        """The operation that undoes this one.

        Raises:
            UnsupportedError: (a NotImplementedError) There is none.
        """
        raise UnsupportedError(f"{type(self).__name__} has no reverse operation: define its reverse_op, or convert in one direction only")

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if value is not None)
        return f"{type(self).__name__}({settings})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).items()))


class Chunk(ConversionOps):
    """Split one tensor along an axis into views, one for each target, in order.

    Args:
        dim: The axis.
        sizes: Lengths of the parts along the axis, such as ``(4096, 1024, 1024)`` for queries, keys and
            values; None: equal lengths.
    """

    def __init__(self, dim: int = 0, sizes: Sequence[int] | None = None) -> None:
        self.dim = dim
        self.sizes = None if sizes is None else tuple(sizes)

    def convert(self, input_dict: Inputs, source_patterns: list[str], target_patterns: list[str], **_: Any) -> dict[str, Tensor]:
        tensor, count = _only(input_dict, self), len(target_patterns)
        if count < 2:
            raise ConfigError(f"{self} splits a tensor and needs two targets or more, not {target_patterns}")
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
    """Join several tensors along an axis, in the order of the sources.

    Args:
        dim: The axis.
        sizes: Lengths of the parts along the axis, which the reverse operation needs where they differ; None:
            equal lengths.
    """

    def __init__(self, dim: int = 0, sizes: Sequence[int] | None = None) -> None:
        self.dim = dim
        self.sizes = None if sizes is None else tuple(sizes)

    def convert(self, input_dict: Inputs, source_patterns: list[str], target_patterns: list[str], **_: Any) -> dict[str, Tensor]:
        if len(target_patterns) != 1:
            raise ConfigError(f"{self} makes one tensor and needs one target, not {target_patterns}")
        parts = [tensor for pattern in source_patterns for tensor in _listed(input_dict[pattern])]
        lengths = tuple(part.shape[self.dim] for part in parts)
        if self.sizes is not None and lengths != self.sizes:
            raise ConfigError(f"{self} was given parts of the sizes {list(lengths)}")
        if self.sizes is None and len(set(lengths)) > 1:
            raise ConfigError(f"{self} was given parts of different sizes, which it could not split again: give sizes={lengths}")
        return {target_patterns[0]: torch.cat(parts, dim=self.dim)}

    @property
    def reverse_op(self) -> ConversionOps:
        """The split along the same axis."""
        return Chunk(self.dim, self.sizes)


class Transpose(ConversionOps):
    """Exchange two axes of each tensor; the results are views."""

    def __init__(self, dim0: int = 0, dim1: int = 1) -> None:
        self.dim0, self.dim1 = dim0, dim1

    def convert(self, input_dict: Inputs, source_patterns: list[str], target_patterns: list[str], **_: Any) -> dict[str, Tensor]:
        is_single = len(input_dict) == 1 and len(target_patterns) == 1
        return {
            target_patterns[0] if is_single and name in source_patterns else name: _tensor(value, self).transpose(self.dim0, self.dim1)
            for name, value in input_dict.items()
        }

    @property
    def reverse_op(self) -> ConversionOps:
        """The same exchange."""
        return Transpose(self.dim0, self.dim1)


class SplitFusedExperts(ConversionOps):
    """Separate fused experts: a tensor ``[E, …]`` becomes views, one for each expert and target.

    The expert's number goes where a target has a star, or before the target: ``gate_proj.weight`` becomes
    ``3.gate_proj.weight``.

    Args:
        split_axis: Axis of one expert's tensor along which two targets are joined, half and half.
        ndim: Number of axes of the fused tensor: 3 for matrices, 2 for biases.
    """

    def __init__(self, split_axis: int = 0, ndim: int = 3) -> None:
        self.split_axis, self.ndim = split_axis, ndim

    def convert(self, input_dict: Inputs, source_patterns: list[str], target_patterns: list[str], **_: Any) -> dict[str, Tensor]:
        fused, count = _only(input_dict, self), len(target_patterns)
        if fused.ndim != self.ndim:
            raise ConfigError(f"{self} needs a tensor of {self.ndim} axes, experts first, not one of the shape {list(fused.shape)}")
        axis = _split_axis(self, count)
        if fused.shape[axis] % count:
            raise ConfigError(f"{self} cannot halve a tensor of the shape {list(fused.shape)} along its axis {axis}")
        parts = [part.unbind() for part in fused.chunk(count, dim=axis)]
        return {numbered(target, i): part[i] for i in range(fused.shape[0]) for target, part in zip(target_patterns, parts, strict=True)}

    @property
    def reverse_op(self) -> ConversionOps:
        """Fuses the experts again."""
        return FuseExperts(self.split_axis, self.ndim)


class FuseExperts(ConversionOps):
    """Fuse the tensors of single experts into one, ``[E, …]``.

    Undoes `SplitFusedExperts` of the same arguments.
    """

    joins_experts = True

    def __init__(self, split_axis: int = 0, ndim: int = 3) -> None:
        self.split_axis, self.ndim = split_axis, ndim

    def convert(self, input_dict: Inputs, source_patterns: list[str], target_patterns: list[str], **_: Any) -> dict[str, Tensor]:
        if len(target_patterns) != 1:
            raise ConfigError(f"{self} makes one tensor and needs one target, not {target_patterns}")
        axis = _split_axis(self, len(source_patterns))
        stacked = [torch.stack(_listed(input_dict[pattern])) for pattern in source_patterns]
        if stacked[0].ndim != self.ndim or len({part.shape for part in stacked}) > 1:
            shapes = [list(part.shape) for part in stacked]
            raise ConfigError(f"{self} needs tensors of one shape that make one of {self.ndim} axes, not {shapes}")
        return {target_patterns[0]: stacked[0] if len(stacked) == 1 else torch.cat(stacked, dim=axis)}

    @property
    def reverse_op(self) -> ConversionOps:
        """Separates the experts again."""
        return SplitFusedExperts(self.split_axis, self.ndim)


def numbered(pattern: str, index: int) -> str:
    """Return the pattern with an expert's number: in place of its star, or before the pattern."""
    return pattern.replace("*", str(index), 1) if "*" in pattern else f"{index}.{pattern}"


def _split_axis(operation: SplitFusedExperts | FuseExperts, count: int) -> int:
    """Return the axis of the fused tensor along which ``count`` patterns are joined."""
    if count not in (1, 2):
        raise ConfigError(f"{operation} handles one or two matrices per expert, not {count}")
    inner = operation.ndim - 1
    if not -inner <= operation.split_axis < inner:
        raise ConfigError(f"{operation}: the tensor of one expert has {inner} axes, split_axis is out of range")
    return operation.split_axis % inner + 1


def _listed(value: Tensor | list[Tensor]) -> list[Tensor]:
    return value if isinstance(value, list) else [value]


def _tensor(value: Tensor | list[Tensor], operation: ConversionOps) -> Tensor:
    tensors = _listed(value)
    if len(tensors) != 1:
        raise ConfigError(f"{operation} works on one tensor and was given {len(tensors)}: join them in an operation before it")
    return tensors[0]


def _only(input_dict: Inputs, operation: ConversionOps) -> Tensor:
    if len(input_dict) != 1:
        raise ConfigError(f"{operation} works on one tensor and was given {sorted(input_dict)}: join them in an operation before it")
    return _tensor(next(iter(input_dict.values())), operation)
