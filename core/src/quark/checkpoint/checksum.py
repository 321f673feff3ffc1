"""Checksums of tensors in files.

They detect damage, but not forgery. To compute a checksum takes only a fraction of the time of writing.
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

    Words of 8 bytes form rows of `ROW` bytes, and rows form blocks of `BLOCK` bytes. The checksum is a hash
    of the sums of each row and of each column of each block, modulo 2^64. If one word changes, the sum of its
    row changes. If two different words are exchanged, the sum of a row or of a column changes.

    Args:
        chunks: The bytes, as chunks of dtype uint8 and shape ``[n]``. All chunks except the last one must
            consist of whole blocks.
    """
    sums, size = _sums(chunks)
    return _text(torch.cat(sums) if sums else torch.empty(0, dtype=torch.int64), size)


def stored_bytes(file: int, offset: int, size: int) -> Iterator[Tensor]:
    """Yield bytes of an open file in chunks for `checksum`. If the file ends early, yield fewer bytes.

    A chunk has the dtype uint8 and the shape ``[n]``. The next chunk overwrites the memory of this one.
    """
    buffer = torch.empty(min(BLOCK, size), dtype=torch.uint8)
    for start in range(offset, offset + size, BLOCK):
        chunk = buffer[: offset + size - start]
        if count := read_at(file, memoryview(chunk.numpy().data), start):
            yield chunk[:count]


def _sums(chunks: Iterable[Tensor]) -> tuple[list[Tensor], int]:
    """Return the sums of rows and columns, as int64 tensors of shape ``[n]``, and the number of bytes."""
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
    """Yield the words of ``data`` as int64 tensors ``[..., rows, words]`` of up to ``count`` blocks each.

    If bytes remain after the last whole row, they are padded with zeros and form a block of one row.
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
    """Return the text of a checksum from all sums and the number of bytes."""
    return f"sums:{hashlib.blake2b(sums.numpy().tobytes(), digest_size=8).hexdigest()}:{size}"
