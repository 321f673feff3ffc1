"""Checksums of tensors, in files and in memory.

They find damage, not forgery, at a fraction of the time of writing.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from quark.base.parallel import one_thread

__all__ = ["ROW", "checksum", "checksums"]

ROW = 4096
"""Bytes that have one factor."""


def checksum(chunks: Iterable[Tensor]) -> str:
    """Return a checksum of some bytes, and their number.

    It is the sum of all words of 8 bytes modulo 2^64, those of row i of 4096 bytes times 2i + 1: any change
    of one word changes it, and so do rows that are zero, missing or exchanged, unless the sums of their words
    agree.

    Args:
        chunks: Of bytes, each uint8 ``[n]``; all but the last have whole rows.
    """
    value = size = 0
    with one_thread():
        for chunk in chunks:
            whole = len(chunk) // ROW * ROW
            if whole:
                value += _weighted(chunk[:whole], size // ROW)
            if whole < len(chunk):
                rest = torch.nn.functional.pad(chunk[whole:], (0, -len(chunk) % 8))
                value += int(_words(rest).sum()) * (2 * ((size + whole) // ROW) + 1)
            size += len(chunk)
    return f"sum64:{value % 2**64:016x}:{size}"


def checksums(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return the checksum of each tensor's bytes, by name; of meta tensors none."""
    return {name: checksum([t.detach().reshape(-1).view(torch.uint8)]) for name, t in tensors if not t.is_meta}


def _weighted(data: Tensor, row: int) -> int:
    """Return the sum over whole rows, numbered from ``row``; int64 arithmetic wraps around."""
    sums = _words(data).view(-1, ROW // 8).sum(1)
    return int((sums * torch.arange(2 * row + 1, 2 * (row + len(sums)) + 1, 2, device=sums.device)).sum())


def _words(data: Tensor) -> Tensor:
    aligned = data.clone() if data.storage_offset() % 8 or data.data_ptr() % 8 else data
    return aligned.view(torch.int64)
