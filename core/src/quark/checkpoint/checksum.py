"""Checksums of tensors in files.

They detect damage, but not forgery. A checksum takes only a fraction of the time that writing a tensor takes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from quark.base.files import read_at
from quark.base.parallel import one_thread

ROW = 4096
"""Number of bytes of one row. The words of a row are added up to a row sum."""
BLOCK = 512 * ROW
"""Number of bytes of one block. The rows of a block are added up to column sums. The processor's cache can
hold a block.
"""


def checksum(chunks: Iterable[Tensor]) -> str:
    """Return a text that contains a checksum of the bytes and the number of bytes.

    Words of 8 bytes form rows of `ROW` bytes, and rows form blocks of `BLOCK` bytes. Each row and each column
    of each block is summed modulo 2^64. The checksum is a hash of these sums. If one word changes, the sum of
    the word's row changes. If two different words are exchanged, the sum of a row or of a column changes.

    Args:
        chunks: The bytes, as chunks of dtype uint8 and shape ``[n]``. The size of each chunk except the last
            one must be a multiple of `BLOCK`.
    """
    sums, size = _sums(chunks)
    return _text(torch.cat(sums) if sums else torch.empty(0, dtype=torch.int64), size)


def stored_bytes(file: int, offset: int, size: int) -> Iterator[Tensor]:
    """Yield the bytes of a part of an open file, in chunks for `checksum`.

    The part begins at ``offset`` and has ``size`` bytes. If the file ends earlier, yield fewer bytes.

    A chunk has the dtype uint8 and the shape ``[n]``. Each chunk overwrites the memory of the chunk before
    it.
    """
    buffer = torch.empty(min(BLOCK, size), dtype=torch.uint8)
    for start in range(offset, offset + size, BLOCK):
        chunk = buffer[: offset + size - start]
        if count := read_at(file, memoryview(chunk.numpy().data), start):
            yield chunk[:count]


def _sums(chunks: Iterable[Tensor]) -> tuple[list[Tensor], int]:
    """Return the sums of all rows and columns, and the number of bytes.

    The sums are int64 tensors of shape ``[n]``.
    """
    rows: list[Tensor] = []
    columns: list[Tensor] = []
    size = 0
    with one_thread():
        for chunk in chunks:
            size += len(chunk)
            # An accelerator processes all whole blocks of a chunk at once. A CPU processes one block at a
            # time, while the block is in its cache.
            for words in _blocks(chunk, 1 if chunk.device.type == "cpu" else max(len(chunk) // BLOCK, 1)):
                rows.append(words.sum(-1).reshape(-1))
                columns.append(words.sum(-2).reshape(-1))
    return [*rows, *columns], size


def _blocks(data: Tensor, count: int) -> Iterator[Tensor]:
    """Yield the words of ``data`` as int64 tensors ``[..., rows, words]``, each with up to ``count`` blocks.

    The bytes after the last whole row, if any, are padded with zeros and form a block of one row.
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
    """Hash all sums, and return a text with the hash and the number of bytes."""
    return f"sums:{hashlib.blake2b(sums.numpy().tobytes(), digest_size=8).hexdigest()}:{size}"
