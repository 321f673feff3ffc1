"""counted_kernels: counts the launches of Triton kernels in Triton's interpreter, and the bytes that the
kernels read and write."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.utils._python_dispatch import _disable_current_modes

from quark.numbers.kernels import VARIABLE
from tools.costs.counter import Counts, OperationCounter

__all__ = ["IS_INTERPRETED", "counted_kernels"]

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
"""Whether kernels run on the CPU, in Triton's interpreter; Triton decides when it is imported."""


@contextmanager
def counted_kernels(counter: OperationCounter) -> Iterator[None]:
    """Make quark use its Triton kernels for CPU tensors, and count each launch as an operation of
    ``counter``.

    The bytes of a launch are the bytes of the elements that each program of the kernel reads or writes. If
    several lanes of a program access the same element at once, it counts once.
    """
    import numpy as np
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, launch = builder.create_masked_load, builder.create_masked_store, executor.__call__
    moved: list[int] = []

    def note(pointers: Any, mask: Any) -> None:
        addresses = np.unique(np.broadcast_to(pointers.data, mask.data.shape)[mask.data.astype(bool)])
        moved.append(len(addresses) * pointers.get_element_ty().primitive_bitwidth // 8)

    def counted_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        note(pointers, mask)
        return load(self, pointers, mask, *rest)

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        note(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def counted_launch(self: Any, *args: Any, **named: Any) -> Any:
        moved.clear()
        with _disable_current_modes():  # the interpreter's own copies are no work of the kernel
            result = launch(self, *args, **named)
        counter.count(Counts(0.0, sum(moved), 1))
        return result

    with (
        patch.dict(os.environ, {VARIABLE: "cpu"}),
        patch.object(builder, "create_masked_load", counted_load),
        patch.object(builder, "create_masked_store", counted_store),
        patch.object(executor, "__call__", counted_launch),
        np.errstate(all="ignore"),
    ):
        yield
