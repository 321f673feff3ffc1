"""Work on a tensor in parts that caches hold: each is read from memory once, and what is made on the way needs little room."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quark.quantizers.qparams import QParams

CHUNK_ELEMENTS = 1 << 20
"""Elements of a part: 4 MiB in float32."""


def in_parts(x: Tensor, result: Tensor, scale_shape: tuple[int, ...], work: Callable[[Tensor, Tensor], QParams]) -> QParams:
    """Call ``work`` on parts of ``x`` and the same parts of ``result``; the scales it finds are put together.

    Args:
        x: Any shape; it is cut between vectors along its last axis.
        result: Contiguous, of the same shape; ``work`` fills the parts of it that it is given.
        scale_shape: Of the scales of the whole tensor.
        work: Takes a part of ``x`` and of ``result``, both ``[vectors, length]``, and returns the part's scales. An outer scale must be
            the same for all of them.
    """
    vectors, target = x.reshape(-1, x.shape[-1]), result.view(-1, x.shape[-1])
    high = max(1, CHUNK_ELEMENTS // x.shape[-1])
    found = [work(vectors[top : top + high], target[top : top + high]) for top in range(0, vectors.shape[0], high)]
    zeros = [q.zero_point for q in found if q.zero_point is not None]
    return QParams(
        torch.cat([q.scale for q in found]).reshape(scale_shape),
        torch.cat(zeros).reshape(scale_shape) if zeros else None,
        found[0].outer_scale,
    )
