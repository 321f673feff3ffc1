"""Where converted tensors lie in a checkpoint: which slice of which stored tensor each one is, from shapes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from quark.errors import UnsupportedError
from quark.hf.weight_converters import WeightConverter, apply_converters


@attrs.frozen
class StoredSlice:
    """A tensor as a part of a stored one.

    Attributes:
        stored: Full name of the stored tensor.
        index: A slice of step 1 for each of its axes.
        order: The axes of what was read, in the order in which the tensor has them.
        shape: Of the tensor.
    """

    stored: str
    index: tuple[slice, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]

    def read(self, source: Any) -> Tensor:
        """The tensor, a view of what was read.

        Args:
            source: The stored tensor, or a slice object of safetensors (``get_slice``), of which only this part is read.
        """
        part: Tensor = source[self.index if self.index else ...]
        return part.permute(self.order).reshape(self.shape)


def stored_slices(shapes: Mapping[str, Sequence[int]], converters: Sequence[WeightConverter]) -> dict[str, StoredSlice]:
    """For each tensor that the converters make of a checkpoint, or leave, where it lies. No data are read.

    Args:
        shapes: Of the stored tensors by full name, as headers have them (`quark.hf.shards`); those of one block will do.
        converters: As for `apply_converters`.

    Raises:
        UnsupportedError: A tensor is joined from several, or is no plain slice of a stored one.
        CheckpointError, ConfigError: As `apply_converters`.
    """
    # The converters run on meta tensors: offset and strides of what they make say where it lies, and there is no second formula for it.
    roots = {name: torch.empty(tuple(shape), device="meta") for name, shape in shapes.items()}
    names = {id(root): name for name, root in roots.items()}
    made: dict[str, StoredSlice] = {}
    for name, tensor in apply_converters(roots, converters).items():
        root = tensor if tensor._base is None else tensor._base
        if id(root) not in names:
            raise UnsupportedError(f"'{name}' is joined from several stored tensors or copied: read those whole and use apply_converters")
        made[name] = _slice_of(tensor, root, name, names[id(root)])
    return made


def _slice_of(tensor: Tensor, root: Tensor, name: str, stored: str) -> StoredSlice:
    # Axes of length 1 lie anywhere; the others of a contiguous tensor have different strides, by which a view's axes are known.
    axis_of = {root.stride(d): d for d in range(root.ndim) if root.shape[d] > 1}
    wide = [d for d in range(tensor.ndim) if tensor.shape[d] > 1]
    if not all(tensor.stride(d) in axis_of for d in wide):
        raise UnsupportedError(
            f"'{name}' takes every other element of '{stored}', or mixes its axes: read it whole and use apply_converters"
        )
    lengths = {axis_of[tensor.stride(d)]: tensor.shape[d] for d in wide}
    rest = int(tensor.storage_offset())
    index = []
    for axis in range(root.ndim):
        start, rest = divmod(rest, root.stride(axis)) if root.shape[axis] > 1 else (0, rest)
        index.append(slice(start, start + lengths.get(axis, 1)))
    found = [axis_of[tensor.stride(d)] for d in wide]
    order = (*found, *(axis for axis in range(root.ndim) if axis not in found))
    return StoredSlice(stored, tuple(index), order, tuple(tensor.shape))
