"""A function that creates weight converters, and operations for weight converters that transformers does not
have.

A weight converter computes tensors of a model from tensors of a checkpoint. It is a ``WeightConverter`` of
transformers, and most operations are in ``transformers.core_model_loading``. When a checkpoint is read,
`quark.models.hf.converted_tensors` applies the converters.

This module imports transformers, so it is imported only if converters are created.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import core_model_loading
from transformers.core_model_loading import ConversionOps, WeightConverter

from quark.config.architecture import WeightConversion
from quark.errors import ConfigError


class Chunk(core_model_loading.Chunk):
    """An operation that splits one tensor along an axis into views. The first view belongs to the first
    target, and so on.

    Args:
        dim: The axis.
        sizes: Lengths of the views along the axis, such as ``(4096, 1024, 1024)`` for queries, keys and
            values. None means equal lengths.
    """

    def __init__(self, dim: int = 0, sizes: Sequence[int] | None = None) -> None:
        super().__init__(dim)
        self.sizes = None if sizes is None else tuple(sizes)

    def convert(self, input_dict: Mapping[str, Any], source_patterns: list[str], target_patterns: list[str], **_: Any) -> dict[str, Tensor]:
        """Return a dictionary from target to view.

        Raises:
            ConfigError: (a ValueError) The tensor cannot be split in this way.
        """
        tensor, count = _only(input_dict, self), len(target_patterns)
        length = tensor.shape[self.dim]
        sizes = self.sizes or (length // count,) * count
        if count < 2 or len(sizes) != count or sum(sizes) != length:
            raise ConfigError(f"{self} cannot split a tensor of the shape {list(tensor.shape)} into {count} parts: give fitting sizes")
        return dict(zip(target_patterns, tensor.split(sizes, dim=self.dim), strict=True))


class SplitFusedExperts(ConversionOps):
    """An operation that separates fused experts.

    It splits a tensor ``[experts, …]`` into views, one for each expert and target. The number of the expert
    replaces the star in a target. If a target has no star, the number and a dot are put before the target.
    For example, ``gate_proj.weight`` becomes ``3.gate_proj.weight``.

    Args:
        split_axis: The axis of one expert's tensor along which two targets are joined. Each target is one
            half of this axis. With one target, this argument is not used.
        ndim: Number of axes of the fused tensor, which is 3 for matrices and 2 for biases.
    """

    def __init__(self, split_axis: int = 0, ndim: int = 3) -> None:
        self.split_axis, self.ndim = split_axis, ndim

    def convert(self, input_dict: Mapping[str, Any], source_patterns: list[str], target_patterns: list[str], **_: Any) -> dict[str, Tensor]:
        """Return a dictionary from name to view, with a view for each expert and target.

        Raises:
            ConfigError: (a ValueError) The tensor does not have the form that the operation needs.
        """
        fused, count, inner = _only(input_dict, self), len(target_patterns), self.ndim - 1
        if count not in (1, 2):
            raise ConfigError(f"{self} handles one or two matrices per expert, not {count}. Give one or two targets")
        if not -inner <= self.split_axis < inner:
            raise ConfigError(f"{self}: the tensor of one expert has {inner} axes, so split_axis={self.split_axis} is out of range")
        if fused.ndim != self.ndim:
            raise ConfigError(f"{self} needs a tensor with {self.ndim} axes, the first for experts, but the shape is {list(fused.shape)}")
        axis = self.split_axis % inner + 1
        if fused.shape[axis] % count:
            raise ConfigError(f"{self} cannot halve a tensor of the shape {list(fused.shape)} along its axis {axis}")
        parts = [part.unbind() for part in fused.chunk(count, dim=axis)]
        numbered = [target if "*" in target else f"*.{target}" for target in target_patterns]
        return {
            target.replace("*", str(i), 1): part[i] for i in range(fused.shape[0]) for target, part in zip(numbered, parts, strict=True)
        }


def _only(input_dict: Mapping[str, Any], operation: ConversionOps) -> Tensor:
    """Return the only tensor in ``input_dict``. Raise ConfigError if ``input_dict`` has several tensors."""
    tensors = [tensor for value in input_dict.values() for tensor in (value if isinstance(value, list) else [value])]
    if len(tensors) != 1:
        raise ConfigError(f"{operation} works on one tensor, but got {len(tensors)}. Join the tensors in an operation before it")
    return tensors[0]


def make_converters(rows: Iterable[WeightConversion]) -> list[WeightConverter]:
    """Return the weight converters that ``rows`` describe.

    Args:
        rows: Descriptions in the form of `quark.config.architecture.Architecture.weight_converters`.

    Raises:
        ConfigError: (a ValueError) An operation is unknown.
    """
    return [
        WeightConverter(source, list(targets), operations=[_operation(name, *settings) for name, *settings in operations])
        for source, targets, operations in rows
    ]


def _operation(name: object, *settings: object) -> ConversionOps:
    """Return a new operation. ``name`` is the name of its class, and ``settings`` are the arguments of its
    constructor."""
    known = {kind.__name__: kind for kind in (*vars(core_model_loading).values(), Chunk, SplitFusedExperts) if _is_operation(kind)}
    if name not in known:
        raise ConfigError(f"there is no conversion operation '{name}': use one of {', '.join(sorted(known))}")
    return known[str(name)](*settings)


def _is_operation(kind: Any) -> bool:
    """Return whether ``kind`` is the class of an operation, and transformers or this module defines this
    class."""
    return isinstance(kind, type) and issubclass(kind, ConversionOps) and kind is not ConversionOps
