"""Checksums of tensors in files.

They find damage, not forgery, at a fraction of the time of writing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from quark.base.files import read_at
from quark.base.parallel import one_thread

ROW = 4096
"""Bytes whose words form one row sum."""
BLOCK = 512 * ROW
"""Bytes whose words form the column sums; a processor's cache holds them."""


def checksum(chunks: Iterable[Tensor]) -> str:
    """Return a text with a checksum of some bytes and with their number.

    Words of 8 bytes form rows of `ROW` bytes, and rows form blocks of `BLOCK` bytes. The checksum is a hash
    of the sums of each row and of each column of each block, modulo 2^64. If one word changes, a row's sum
    changes. If two different words are exchanged, a row's or a column's sum changes.

    Args:
        chunks: Bytes, each chunk uint8 ``[n]``; all chunks but the last have whole blocks.
    """
    sums, size = _sums(chunks)
    return _text(torch.cat(sums) if sums else torch.empty(0, dtype=torch.int64), size)


def stored_bytes(file: int, offset: int, size: int) -> Iterator[Tensor]:
    """Yield bytes of an open file in chunks for `checksum`, uint8 ``[n]``; fewer if the file ends early.

    The next chunk overwrites this one in memory.
    """
    buffer = torch.empty(min(BLOCK, size), dtype=torch.uint8)
    for start in range(offset, offset + size, BLOCK):
        chunk = buffer[: offset + size - start]
        if count := read_at(file, memoryview(chunk.numpy().data), start):
            yield chunk[:count]


def _sums(chunks: Iterable[Tensor]) -> tuple[list[Tensor], int]:
    """Return the sums of the rows and of the columns, int64 ``[n]`` each, and the number of bytes."""
    rows: list[Tensor] = []
    columns: list[Tensor] = []
    size = 0
    with one_thread():
        for chunk in chunks:
            size += len(chunk)
            # An accelerator processes all whole blocks at once; a processor each block while it is in its
            # cache.
            for words in _blocks(chunk, 1 if chunk.device.type == "cpu" else max(len(chunk) // BLOCK, 1)):
                rows.append(words.sum(-1).reshape(-1))
                columns.append(words.sum(-2).reshape(-1))
    return [*rows, *columns], size


def _blocks(data: Tensor, count: int) -> Iterator[Tensor]:
    """Yield the words of up to ``count`` blocks, int64 ``[..., rows, words]``.

    A rest of less than a row, padded with zeros, is a block.
    """
    rest = len(data) % ROW
    whole = data[: len(data) - rest]
    if whole.storage_offset() % 8 or whole.data_ptr() % 8:
        whole = whole.clone()
    for piece in whole.split(count * BLOCK) if len(whole) else ():
        rows = piece.view(torch.int64).view(-1, ROW // 8)
        yield rows if len(piece) <= BLOCK else rows.view(-1, BLOCK // ROW, ROW // 8)
    if rest:
        yield torch.nn.functional.pad(data[-rest:], (0, ROW - rest)).view(torch.int64).view(1, -1)


def _text(sums: Tensor, size: int) -> str:
    return f"sums:{hashlib.blake2b(sums.numpy().tobytes(), digest_size=8).hexdigest()}:{size}"
