"""The operator of torch for all layers: a compiled model calls it, and traces nothing of a number format."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakValueDictionary

import attrs
import torch
from torch import Tensor

__all__ = ["Operation", "announce", "call"]


@attrs.define(eq=False, slots=False)
class Operation:
    """A function of a tensor that a model calls by name.

    Attributes:
        function: Returns a new tensor, ``[…, width]``.
        width: Size of the last axis of what it returns.
        dtype: Of what it returns.
        adds_axis: Whether that axis is added to those of the input, as by a look-up, and replaces none.
    """

    function: Callable[[Tensor], Tensor]
    width: int
    dtype: torch.dtype
    adds_axis: bool = False


_OPERATIONS: WeakValueDictionary[str, Operation] = WeakValueDictionary()


def announce(name: str, operation: Operation) -> None:
    """Let `call` find an operation by a name that no other of the model has, while somebody holds it."""
    _OPERATIONS[name] = operation


def call(name: str, x: Tensor) -> Tensor:
    """Return the result of an operation."""
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
