"""Kernels that pack and unpack codes. They read the data once and write it once.

A word has neighbouring codes of a row or of a column. The results are the same as in
`quark_schemes.arithmetic.packing`.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
import triton
import triton.language as tl
from torch import Tensor

from quark.numbers.kernels import launching_on

__all__ = ["NIBBLES", "PAIRS", "REORDERED_NIBBLES", "TWO_BITS", "WordLayout", "packed", "packed_across", "unpacked", "unpacked_across"]

TILE_ROWS, TILE_WORDS = 64, 16
"""Number of words that one program handles in a row.

If it packs across rows, the program reads 64 bytes of codes and writes 64 bytes of words at a time.
"""


@attrs.frozen
class WordLayout:
    """The order of the codes in a word.

    Attributes:
        bits: Number of bits of a code.
        codes: Number of codes in a word.
        dtype: Dtype of a word.
        is_interleaved: Whether the codes at even indices are in the lower half of the word. From the lowest
            bits, the codes are then 0 2 4 6 1 3 5 7.
        is_reversed: Whether the first code is in the highest bits.
    """

    bits: int
    codes: int
    dtype: torch.dtype
    is_interleaved: bool = False
    is_reversed: bool = False


NIBBLES = WordLayout(4, 8, torch.int32)
REORDERED_NIBBLES = WordLayout(4, 8, torch.int32, is_interleaved=True)
PAIRS = WordLayout(4, 2, torch.uint8)
TWO_BITS = WordLayout(2, 4, torch.uint8, is_reversed=True)


@triton.jit
def _position(code, CODES: tl.constexpr, IS_INTERLEAVED: tl.constexpr, IS_REVERSED: tl.constexpr):
    """Return the position of the code ``code`` in a word. The position in the lowest bits is 0."""
    if IS_INTERLEAVED:
        position = code % 2 * (CODES // 2) + code // 2
    elif IS_REVERSED:
        position = CODES - 1 - code
    else:
        position = code
    return position


@triton.jit
def pack_words(
    codes_ptr,  # code i of row r at r · row_stride + i · code_stride
    words_ptr,  # [rows, words], contiguous
    rows,
    words,
    count,  # codes of a row; missing codes of the last word are 0
    row_stride,
    code_stride,
    BITS: tl.constexpr,
    CODES: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    IS_REVERSED: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Pack codes into words. A word has ``CODES`` consecutive codes of a row."""
    blocks = tl.cdiv(words, WORDS)
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    word = tl.program_id(0) % blocks * WORDS + tl.arange(0, WORDS)
    number = tl.program_id(0) % blocks * WORDS * CODES + tl.arange(0, WORDS * CODES)
    place = row.to(tl.int64)[:, None] * row_stride + number.to(tl.int64)[None, :] * code_stride
    is_inside = (row < rows)[:, None] & (number < count)[None, :]
    codes = tl.load(codes_ptr + place, mask=is_inside, other=0).to(tl.int32) & ((1 << BITS) - 1)
    position = _position(number % CODES, CODES, IS_INTERLEAVED, IS_REVERSED)
    # No two codes share a bit, so the sum of the shifted codes is the word.
    packed = tl.sum(tl.reshape(codes << (position * BITS)[None, :], [ROWS, WORDS, CODES]), 2)
    target = row.to(tl.int64)[:, None] * words + word[None, :]
    is_word = (row < rows)[:, None] & (word < words)[None, :]
    tl.store(words_ptr + target, packed.to(words_ptr.dtype.element_ty), mask=is_word)


@triton.jit
def unpack_words(
    words_ptr,  # word i of row r at r · row_stride + i · word_stride
    codes_ptr,  # code i of row r at r · code_row_stride + i · code_stride
    rows,
    count,  # codes of a row
    row_stride,
    word_stride,
    code_row_stride,
    code_stride,
    BITS: tl.constexpr,
    CODES: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    IS_REVERSED: tl.constexpr,
    IS_SIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Undo `pack_words`. If ``IS_SIGNED``, the highest bit of a code is the sign."""
    blocks = tl.cdiv(count, WORDS * CODES)
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    number = tl.program_id(0) % blocks * WORDS + tl.arange(0, WORDS)
    is_word = (row < rows)[:, None] & (number * CODES < count)[None, :]
    place = row.to(tl.int64)[:, None] * row_stride + number.to(tl.int64)[None, :] * word_stride
    words = tl.load(words_ptr + place, mask=is_word, other=0).to(tl.int32)
    position = _position(tl.arange(0, CODES), CODES, IS_INTERLEAVED, IS_REVERSED)
    # Shift a code left to the sign bit, then right again: the second shift extends the sign.
    codes = (words[:, :, None] << (32 - BITS - position * BITS)[None, None, :]) >> (32 - BITS)
    if not IS_SIGNED:
        codes = codes & ((1 << BITS) - 1)
    codes = tl.reshape(codes.to(codes_ptr.dtype.element_ty), [ROWS, WORDS * CODES])
    number = tl.program_id(0) % blocks * WORDS * CODES + tl.arange(0, WORDS * CODES)
    is_inside = (row < rows)[:, None] & (number < count)[None, :]
    target = row.to(tl.int64)[:, None] * code_row_stride + number.to(tl.int64)[None, :] * code_stride
    tl.store(codes_ptr + target, codes, mask=is_inside)


def _constants(layout: WordLayout) -> dict[str, Any]:
    """Return the constants and the launch parameters of `pack_words` and `unpack_words` for a layout."""
    return {
        "BITS": layout.bits,
        "CODES": layout.codes,
        "IS_INTERLEAVED": layout.is_interleaved,
        "IS_REVERSED": layout.is_reversed,
        "ROWS": TILE_ROWS,
        "WORDS": TILE_WORDS,
        "num_warps": 8,
    }


def packed(codes: Tensor, layout: WordLayout) -> Tensor:
    """Pack codes, which have a byte each, into words along the last axis.

    The shape changes from ``[…, K]`` to ``[…, ceil(K / layout.codes)]``.
    """
    length = codes.shape[-1]
    return _packed(codes.reshape(-1, length), layout).reshape(*codes.shape[:-1], -1)


def packed_across(codes: Tensor, layout: WordLayout) -> Tensor:
    """Return ``packed(codes.T, layout)`` for codes ``[O, I]``, without copying the transposed matrix.

    The result is ``[I, ceil(O / layout.codes)]``.
    """
    return _packed(codes.t(), layout)


def unpacked(words: Tensor, layout: WordLayout, length: int, *, signed: bool) -> Tensor:
    """Undo `packed`: return the first ``length`` codes of the last axis, int8 if signed, otherwise uint8."""
    codes = torch.empty(*words.shape[:-1], length, dtype=torch.int8 if signed else torch.uint8, device=words.device)
    _unpack(words.reshape(-1, words.shape[-1]), codes.view(-1, length), layout, signed)
    return codes


def unpacked_across(words: Tensor, layout: WordLayout, rows: int, *, signed: bool) -> Tensor:
    """Undo `packed_across`: unpack words ``[I, ceil(rows / layout.codes)]`` to codes ``[rows, I]``."""
    codes = torch.empty(rows, len(words), dtype=torch.int8 if signed else torch.uint8, device=words.device)
    _unpack(words, codes.t(), layout, signed)
    return codes


def _unpack(words: Tensor, codes: Tensor, layout: WordLayout, signed: bool) -> None:
    """Unpack each row of ``words`` to a row of ``codes``, a matrix that may have any strides."""
    rows, count = codes.shape
    grid = (triton.cdiv(rows, TILE_ROWS) * triton.cdiv(count, TILE_WORDS * layout.codes),)
    with launching_on(words.device):
        unpack_words[grid](
            words,
            codes,
            rows,
            count,
            *words.stride(),
            *codes.stride(),
            IS_SIGNED=signed,
            **_constants(layout),
        )


def _packed(matrix: Tensor, layout: WordLayout) -> Tensor:
    rows, count = matrix.shape
    words = triton.cdiv(count, layout.codes)
    result = torch.empty(rows, words, dtype=layout.dtype, device=matrix.device)
    grid = (triton.cdiv(rows, TILE_ROWS) * triton.cdiv(words, TILE_WORDS),)
    with launching_on(matrix.device):
        pack_words[grid](
            matrix,
            result,
            rows,
            words,
            count,
            *matrix.stride(),
            **_constants(layout),
        )
    return result
