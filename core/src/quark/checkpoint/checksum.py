"""Checksums of tensors, in files and in memory.

They find damage, not forgery, at a fraction of the time of writing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
    parts, size = _parts(chunks)
    return _text(_read(parts), size)


def checksums(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return the checksum of each tensor's bytes, by name; of meta tensors none.

    The host waits for an accelerator once.
    """
    found = {name: _parts([t.detach().reshape(-1).view(torch.uint8)]) for name, t in tensors if not t.is_meta}
    values = iter(_read([part for parts, _ in found.values() for part in parts]))
    return {name: _text([next(values) for _ in parts], size) for name, (parts, size) in found.items()}


def _read(parts: Sequence[Tensor]) -> list[int]:
    return torch.stack([part.to(parts[0].device) for part in parts]).tolist() if parts else []


def _parts(chunks: Iterable[Tensor]) -> tuple[list[Tensor], int]:
    """Return sums that add up to that of all words, modulo 2^64, int64; and the number of bytes."""
    parts: list[Tensor] = []
    size = 0
    with one_thread():
        for chunk in chunks:
            whole = len(chunk) // ROW * ROW
            if whole:
                parts.append(_weighted(chunk[:whole], size // ROW))
            if whole < len(chunk):
                rest = torch.nn.functional.pad(chunk[whole:], (0, -len(chunk) % 8))
                parts.append(_words(rest).sum() * (2 * ((size + whole) // ROW) + 1))
            size += len(chunk)
    return parts, size


def _text(parts: Iterable[int], size: int) -> str:
    return f"sum64:{sum(parts) % 2**64:016x}:{size}"


def _weighted(data: Tensor, row: int) -> Tensor:
    """Return the sum over whole rows, numbered from ``row``."""
    sums = _words(data).view(-1, ROW // 8).sum(1)
    return (sums * torch.arange(2 * row + 1, 2 * (row + len(sums)) + 1, 2, device=sums.device)).sum()


def _words(data: Tensor) -> Tensor:
    aligned = data.clone() if data.storage_offset() % 8 or data.data_ptr() % 8 else data
    return aligned.view(torch.int64)
