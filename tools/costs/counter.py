"""OperationCounter: counts torch's operations, FLOPs and bytes, for each phase of a run and each module."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

__all__ = ["Counts", "OperationCounter"]

_ATEN = torch.ops.aten
_SERVING = ("quark.base.", "quark.numbers.", "quark_schemes.", "quark_devkit.")
"""Prefixes of modules whose operations count for their callers."""


@attrs.define
class Counts:
    """FLOPs, bytes and number of operations.

    Attributes:
        flops: FLOPs of products, factorizations and solutions of systems. A multiplication is one FLOP, and
            so is an addition. Elementwise operations have no FLOPs; their cost is the bytes that they move.
        bytes: Bytes read from operands and written to results by each operation, without the effect of
            caches. A broadcast operand counts once.
        operations: Number of operations that read or write; views do not count.
    """

    flops: float = 0.0
    bytes: int = 0
    operations: int = 0

    def __add__(self, other: Counts) -> Counts:
        """Return the sum."""
        return Counts(self.flops + other.flops, self.bytes + other.bytes, self.operations + other.operations)


class OperationCounter(TorchDispatchMode):
    """Context manager that counts the operations of this thread, their FLOPs and bytes.

    Attributes:
        phase: The phase to which the next operations belong.
        parts: `Counts` by phase and by the module of this project that called the operation, such as
            ``("solve", "quark_algos.scale_search")``. Operations of number formats and quantizers count for
            the module that called these.

    Example:
        >>> with OperationCounter() as counter:
        ...     _ = torch.ones(2, 3) @ torch.ones(3, 4)
        >>> counter.total.flops
        48.0
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.parts: dict[tuple[str, str], Counts] = {}

    @property
    def total(self) -> Counts:
        """The sum over all phases and modules."""
        return sum(self.parts.values(), Counts())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not _is_view(func):
            written = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
            read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            if any(t.is_meta for t in written):
                return result  # this computes and moves nothing; only some versions of torch call it
            moved = 0 if func.overloadpacket in _ALLOCATIONS else sum(map(_bytes, read + written))
            self.count(Counts(_flops(func, args, kwargs, result), moved, 1))
        return result

    def count(self, counts: Counts) -> None:
        """Add counts to the part for the current phase and for the module that called the operation."""
        part = self.phase, _module(sys._getframe())
        self.parts[part] = self.parts.get(part, Counts()) + counts


_ALLOCATIONS = {_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided}


def _module(frame: FrameType | None) -> str:
    """Return the innermost module of this project on the call stack for which operations are counted; ``""``
    if there is none."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("quark") and not name.startswith(_SERVING):
            return str(name)
        frame = frame.f_back
    return ""


def _is_view(func: Any) -> bool:
    """Return whether an operation writes nothing, and returns tensors that share memory with its operands."""
    returned = [value.alias_info for value in func._schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)


def _bytes(tensor: Tensor) -> int:
    """Return the number of bytes of a tensor. A broadcast dimension (stride 0) counts as one element."""
    sizes = (size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.element_size() * (math.prod(sizes) if tensor.numel() else 0)


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Return the FLOPs of an operation by torch's formulas or by `_OTHER_FLOPS`."""
    packet = func.overloadpacket
    if packet in _OTHER_FLOPS:
        return _OTHER_FLOPS[packet](*args)
    formula = flop_registry.get(_IN_PLACE.get(packet, packet))
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=result))


_IN_PLACE = {_ATEN.addmm_: _ATEN.addmm, _ATEN.baddbmm_: _ATEN.baddbmm}
"""Products that are added to a tensor in place, and the operations whose formulas torch has for them."""


_OTHER_FLOPS: Mapping[Any, Callable[..., float]] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: lambda query, key, *_: 4.0 * query.numel() * key.shape[-2],
    _ATEN.dot: lambda a, b: 2.0 * a.numel(),
    _ATEN.mv: lambda a, b: 2.0 * a.numel(),
    _ATEN.addmv: lambda c, a, b, **_: 2.0 * a.numel(),
    _ATEN.addmv_: lambda c, a, b, **_: 2.0 * a.numel(),
    _ATEN.addr: lambda c, a, b, **_: 2.0 * a.numel() * b.numel(),
    _ATEN.addr_: lambda c, a, b, **_: 2.0 * a.numel() * b.numel(),
    _ATEN.linalg_cholesky_ex: lambda a, **_: a.numel() * a.shape[-1] / 3.0,
    _ATEN.cholesky_inverse: lambda a, *_: 2.0 * a.numel() * a.shape[-1] / 3.0,
    _ATEN.cholesky_solve: lambda b, a, *_: 2.0 * b.numel() * a.shape[-1],
    _ATEN.linalg_solve_triangular: lambda a, b, **_: float(b.numel() * a.shape[-1]),
    _ATEN.linalg_inv_ex: lambda a, **_: 2.0 * a.numel() * a.shape[-1],
    _ATEN._linalg_eigh: lambda a, *_: 9.0 * a.numel() * a.shape[-1],
    _ATEN.linalg_qr: lambda a, *_: 4.0 * a.numel() * a.shape[-1] / 3.0,
}
"""Leading terms of the FLOPs of operations for which some versions of torch have no formula."""
