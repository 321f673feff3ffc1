"""The torch operator that runs quark's layers.

A compiled model calls this operator, so torch.compile does not have to trace the code of a number format.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakValueDictionary

import attrs
import torch
from torch import Tensor

__all__ = ["Operation", "announce", "call"]


@attrs.define(eq=False, slots=False)
class Operation:
    """A function that a compiled model calls by name. It has one tensor as input and one as output.

    Attributes:
        function: The function. It returns a new tensor ``[…, width]``.
        width: Size of the last axis of the result.
        dtype: Dtype of the result.
        adds_axis: Whether the result has one axis more than the input, like the result of a lookup.
            Otherwise, the result has as many axes as the input, and only the last axis has another size.
    """

    function: Callable[[Tensor], Tensor]
    width: int
    dtype: torch.dtype
    adds_axis: bool = False


_OPERATIONS: WeakValueDictionary[str, Operation] = WeakValueDictionary()


def announce(name: str, operation: Operation) -> None:
    """Register an operation under a unique name, so that `call` can run it.

    The operation stays registered as long as another object references it.
    """
    _OPERATIONS[name] = operation


def call(name: str, x: Tensor) -> Tensor:
    """Run the operation that is registered as ``name`` on ``x``, and return the result."""
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
