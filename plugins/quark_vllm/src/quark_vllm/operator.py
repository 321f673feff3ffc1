"""The torch operator for all layers: a compiled model calls it instead of tracing a number format."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakValueDictionary

import attrs
import torch
from torch import Tensor

__all__ = ["Operation", "announce", "call"]


@attrs.define(eq=False, slots=False)
class Operation:
    """A function that a compiled model calls by name: one tensor in, one out.

    Attributes:
        function: Returns a new tensor, ``[…, width]``.
        width: Size of the result's last axis.
        dtype: Dtype of the result.
        adds_axis: Whether this axis is added to the input's axes, as in a lookup, instead of replacing the
            last.
    """

    function: Callable[[Tensor], Tensor]
    width: int
    dtype: torch.dtype
    adds_axis: bool = False


_OPERATIONS: WeakValueDictionary[str, Operation] = WeakValueDictionary()


def announce(name: str, operation: Operation) -> None:
    """Register an operation for `call` under a unique name while a reference exists."""
    _OPERATIONS[name] = operation


def call(name: str, x: Tensor) -> Tensor:
    """Run an operation by name and return its result."""
    result: Tensor = torch.ops.quark_vllm.call(x, name)
    return result


@torch.library.custom_op("quark_vllm::call", mutates_args=(), schema="(Tensor x, str name) -> Tensor")
def _call(x: Tensor, name: str) -> Tensor:
    return _OPERATIONS[name].function(x)


@_call.register_fake
def _shape_only(x: Tensor, name: str) -> Tensor:
    operation = _OPERATIONS[name]
    shape = x.shape if operation.adds_axis else x.shape[:-1]
    return x.new_empty((*shape, operation.width), dtype=operation.dtype)
