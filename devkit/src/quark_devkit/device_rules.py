"""Rules of the simulated device: operators that a GPU refuses, and operators that make the host wait."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from quark.base import scalars

__all__ = ["NAME", "Wait", "WaitKind", "refuse_mixed", "wait_of"]

NAME = "simulated"
"""Name of the device."""
_MOVING = ("copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "set_", "lift_fresh")
"""Operators that accept tensors of both devices: copies, and indexing, which moves indices to the device."""
_CHECKED = ("_linalg_check_errors", "_linalg_eigh", "_linalg_svd", "linalg_eig")
"""Operators whose GPU kernels read values to check them."""


WaitKind = Literal["value", "shape", "to host", "from host"]


@attrs.frozen
class Wait:
    """A wait of the host for the device.

    Attributes:
        kind: ``"value"``: Python reads a value, for example in ``float(x)`` or ``bool(x)``; ``"shape"``: a
            result's shape depends on values, for example in ``x[mask]``; ``"to host"`` and ``"from host"``: a
            copy that is not ``non_blocking``.
        place: File, line and function outside torch that caused the wait, such as
            ``"gptq/damping.py:90 damped"``.
        operator: Name of the operator, such as ``"aten::_local_scalar_dense"``.
    """

    kind: WaitKind
    place: str
    operator: str


def refuse_mixed(func: Any, name: str, tensors: Sequence[Tensor], args: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise RuntimeError, as torch does, if an operator mixes tensors of the CPU and of the simulated
    device."""
    generator = kwargs.get("generator")
    if generator is not None and generator.device.type != NAME:
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found '{generator.device.type}' ({func}, {_place()})")
    of_cpu = [x for x in tensors if x.device.type == "cpu"]
    if name in _MOVING:
        values = args[2:3] if "index_put" in name else ()
        of_cpu = [x for x in values if isinstance(x, Tensor) and x.device.type == "cpu" and x.dim()]
        if name != "copy_" and isinstance(args[0], Tensor) and args[0].device.type == "cpu" and "index" in name:
            of_cpu.append(args[0])
    elif torch.Tag.pointwise in func.tags or name in ("masked_fill", "masked_fill_", "where", "fill_", "lerp_"):
        written = {i for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write}
        changed = [args[i] for i in written if i < len(args)]
        of_cpu = [x for x in of_cpu if x.dim() or any(x is c for c in changed)]
    if of_cpu:
        shapes = ", ".join(f"{x.device.type}{list(x.shape)}" for x in tensors)
        found = f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:0 and cpu!"
        raise RuntimeError(f"{found} ({func}: {shapes}; {_place()})")


def wait_of(func: Any, name: str, args: Any, kwargs: Mapping[str, Any]) -> Wait | None:
    """Return how the host waits for an operator; None if the host does not wait."""
    kind: WaitKind | None = None
    if name == "copy_":
        kind = _copied(args[0], args[1], kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
    elif name == "_to_copy":
        target = kwargs.get("device")
        kind = "to host" if target is not None and torch.device(target).type == "cpu" and not kwargs.get("non_blocking") else None
    elif "index" in name and name in _MOVING:
        kind = _indexed(args, is_written="put" in name)
    elif torch.Tag.dynamic_output_shape in func.tags:
        kind = "shape"
    elif torch.Tag.data_dependent_output in func.tags or name in _CHECKED or (name == "histc" and args[2:3] == args[3:4]):
        kind = "value"
    return None if kind is None else Wait(kind, _place(), func._schema.name)


def _copied(target: Tensor, source: Tensor, non_blocking: bool) -> WaitKind | None:
    is_own, from_own = (x.device.type == NAME for x in (target, source))
    if is_own is from_own or not source.numel() or non_blocking:
        return None
    return "from host" if is_own else "to host"


def _indexed(args: Any, *, is_written: bool) -> WaitKind | None:
    """Return the kind of wait that an indexing operator causes: for the shape of a masked result, or for
    indices that are copied from the host. Return None if there is no wait."""
    indices = [x for x in args[1] if isinstance(x, Tensor)]
    if any(x.dtype in (torch.bool, torch.uint8) for x in indices):
        is_filled = is_written and len(indices) == 1 and args[2].numel() == 1  # then torch fills instead of indexing
        return None if is_filled else "shape"
    return "from host" if any(x.device.type == "cpu" for x in indices) else None


_PASSED_OVER = (
    str(Path(torch.__file__).parent),
    str(Path(scalars.__file__)),
    str(Path(__file__).parent / "simulated_device.py"),
    __file__,
    "<",
)
"""Path prefixes of files that do not count as the place of a wait."""


def _place() -> str:
    """Return the innermost place on the call stack outside torch and the simulated device: the end of the
    path, the line, and the function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_PASSED_OVER) and not file.endswith("contextlib.py"):
            path = Path(file)
            return f"{path.parent.name}/{path.name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "autograd"
