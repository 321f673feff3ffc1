"""Work on a tensor in parts that fit into caches, in several threads: each part is read from memory once, and temporaries are small."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quark.base.parallel import parallel_map, row_slices
from quark.numbers.qparams import QParams

__all__ = ["CHUNK_ELEMENTS", "in_parts"]

CHUNK_ELEMENTS = 1 << 19
"""Elements of a part on CPUs, 2 MiB in float32: the work of one thread at a time. Other devices take a tensor
whole.
"""


def in_parts(x: Tensor, result: Tensor, scale_shape: tuple[int, ...], work: Callable[[Tensor, Tensor], QParams]) -> QParams:
    """Call ``work`` on parts of ``x`` and the same parts of ``result``; returns the scales of all parts as one.

    Args:
        x: Any shape; it is cut between vectors along its last axis.
        result: Contiguous, of the same shape; ``work`` fills the parts of it that it is given. It may be
            ``x``, where nothing is filled.
        scale_shape: Of the scales of the whole tensor.
        work: Takes a part of ``x`` and of ``result``, both ``[vectors, length]``, and returns the part's
            scales. An outer scale must be the same for all of them.
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
