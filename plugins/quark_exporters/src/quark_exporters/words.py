"""Unsigned codes of 4 or 8 bits in words of 32 bits, the first in the lowest bits, each row in words of its own."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["packed_words", "unpacked_words"]

_WORD = 32


def packed_words(codes: Tensor, bits: int) -> Tensor:
    """Return the words of codes; works on meta tensors.

    >>> [hex(word) for word in packed_words(torch.arange(10, dtype=torch.uint8)[None], 4)[0].tolist()]
    ['0x76543210', '0x98']

    Args:
        codes: uint8 ``[rows, columns]``.
        bits: 4 or 8.

    Returns:
        int32 ``[rows, ⌈columns · bits / 32⌉]``; the last word is filled up with zeros.
    """
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % (_WORD // bits)))
    if bits == 4:
        padded = padded[:, 0::2] | (padded[:, 1::2] << 4)
    return padded.reshape(-1).view(torch.int32).reshape(len(codes), -1)


def unpacked_words(words: Tensor, bits: int, columns: int) -> Tensor:
    """Undo `packed_words`: return uint8 codes ``[rows, columns]``."""
    data = words.reshape(-1).view(torch.uint8).reshape(len(words), -1)
    if bits == 4:
        data = torch.stack((data & 0xF, data >> 4), dim=-1).flatten(1)
    return data[:, :columns]
