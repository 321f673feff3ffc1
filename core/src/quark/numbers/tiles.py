"""Functions that process large tensors in parts, provide scratch memory for tiles, and cast to finite values.

A part fits into the cache. It is read from memory once, and its temporary tensors are small. A thread reuses
the memory of these temporary tensors for the next tile and the next tensor. Newly allocated memory would take
several times as long as the arithmetic, because the system provides memory page by page and clears each page.

Results are cast without overflow, because rounding may go up. The largest magnitude of a symmetric INT4
tensor lies at 7.5 steps and is rounded to 8. In a float16 tensor, 62,000 then becomes 66,133, which is beyond
float16.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quark.base.parallel import parallel_map, row_slices
from quark.numbers.number_format import QParams

_LOCAL = threading.local()
_KEPT = 1 << 20
"""Maximum scratch memory that a thread keeps, in bytes."""


def scratch(shape: Sequence[int], dtype: torch.dtype, device: torch.device, use: str) -> Tensor:
    """Return a contiguous tensor of uninitialized memory.

    The result is valid until the same thread calls the function with the same ``use`` again.

    Args:
        shape: Shape of the result.
        dtype: Dtype of the result.
        device: Device of the result. On devices other than the CPU, and for more than a tile, each call
            allocates new memory.
        use: A name of the purpose. Scratch tensors that are used at the same time must have different names.
    """
    if device.type != "cpu" or math.prod(shape) * dtype.itemsize > _KEPT:
        return torch.empty(shape, dtype=dtype, device=device)
    return kept_room(shape, dtype, device, use)


def kept_room(shape: Sequence[int], dtype: torch.dtype, device: torch.device, use: str) -> Tensor:
    """Return scratch memory like `scratch`, but reuse memory of any size and on any device.

    For each ``use`` and device, a thread does not free the largest piece of memory that was requested.
    """
    rooms: dict[tuple[str, torch.device], Tensor] = _LOCAL.__dict__.setdefault("rooms", {})
    size = math.prod(shape) * dtype.itemsize
    room = rooms.get((use, device))
    if room is None or room.numel() < size:
        rooms.pop((use, device), None)
        with torch.inference_mode(False):  # memory of inference mode cannot be written outside of it
            rooms[use, device] = room = torch.empty(size, dtype=torch.uint8, device=device)
    return room[:size].view(dtype).view(shape)


CHUNK_ELEMENTS = 1 << 19
"""Elements that one thread processes at a time on CPUs: 2 MiB in float32. Other devices process a whole
tensor.
"""


def in_parts(x: Tensor, result: Tensor, scale_shape: tuple[int, ...], work: Callable[[Tensor, Tensor], QParams]) -> QParams:
    """Call ``work`` on parts of ``x`` and of ``result``, and return the joined scales.

    Args:
        x: A tensor of any shape. Each part contains whole vectors along the last axis.
        result: A contiguous tensor with the shape of ``x``, whose parts ``work`` fills. It may be ``x`` if
            ``work`` fills nothing.
        scale_shape: Shape of the scales of the whole tensor.
        work: A function of a part of ``x`` and the same part of ``result``, both of shape ``[vectors,
            length]``. It returns the scales of the part. The outer scale must be the same for all parts.
    """
    vectors = x.reshape(-1, x.shape[-1])
    target = vectors if result is x else result.view(-1, x.shape[-1])
    size = CHUNK_ELEMENTS if x.device.type == "cpu" else x.numel()
    parts = row_slices(vectors.shape[0], x.shape[-1], size)
    found = parallel_map(lambda rows: work(vectors[rows], target[rows]), parts, x.device)
    zeros = [q.zero_point for q in found if q.zero_point is not None]
    return QParams(
        torch.cat([q.scale for q in found]).reshape(scale_shape),
        torch.cat(zeros).reshape(scale_shape) if zeros else None,
        found[0].outer_scale,
    )


_LARGEST_OF_NARROW = 2.0**120
"""A dtype whose largest value exceeds this has float32's exponents, so that every float32 result fits into
it.
"""


def cast_finite(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast ``values`` to ``dtype``.

    Values beyond the range of ``dtype`` become the largest finite value with the same sign. NaN stays NaN.
    """
    limit = torch.finfo(dtype).max
    return values.to(dtype) if limit > _LARGEST_OF_NARROW else values.clamp(-limit, limit).to(dtype)


def keep_finite_(x: Tensor) -> Tensor:
    """Replace infinities in ``x`` in place, and return ``x``.

    An infinity becomes the largest finite value of the dtype with the same sign. NaN stays NaN.
    """
    limit = torch.finfo(x.dtype).max
    return x if limit > _LARGEST_OF_NARROW else x.clamp_(-limit, limit)
