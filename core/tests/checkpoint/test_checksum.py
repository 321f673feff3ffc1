"""A checksum finds damage to a word, exchanged words and lost pages, however the bytes are read."""

import hashlib
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quark.checkpoint.checksum import BLOCK, ROW, _blocks, checksum, stored_bytes

SIZES = st.one_of(st.integers(0, 3 * ROW), st.integers(BLOCK - ROW, BLOCK + 2 * ROW))


def data(size: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None)
@given(SIZES, st.integers(0, 2**32 - 1), st.data())
def test_a_change_of_one_bit_or_of_the_length_changes_it(size: int, seed: int, draw: st.DataObject) -> None:
    x = data(size, seed)
    assert checksum([x[:-1]]) != checksum([x]) or not size
    if size:
        other, place = x.clone(), draw.draw(st.integers(0, size - 1))
        other[place] ^= 1 << draw.draw(st.integers(0, 7))
        assert checksum([other]) != checksum([x])


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4, 8, 512, ROW]), st.data())
def test_an_exchange_of_words_changes_it(seed: int, width: int, draw: st.DataObject) -> None:
    x = data(3 * ROW, seed)
    one, other = draw.draw(st.lists(st.integers(0, len(x) // width - 1), min_size=2, max_size=2, unique=True))
    moved = x.clone().view(-1, width)
    moved[[one, other]] = moved[[other, one]]
    assert (checksum([moved.reshape(-1)]) == checksum([x])) == bool((moved.reshape(-1) == x).all())


@pytest.mark.parametrize("bit", [0, 31, 32, 63])
@pytest.mark.parametrize("distance", [1, 2, 64, 511, 512, 1024, BLOCK // 8])
def test_an_exchange_of_words_that_differ_in_one_bit_changes_it(bit: int, distance: int) -> None:
    x = torch.zeros(BLOCK // 4, dtype=torch.int64)
    x[7] = torch.tensor(1 << bit if bit < 63 else -(1 << 63))
    moved = x.roll(distance)
    assert checksum([moved.view(torch.uint8)]) != checksum([x.view(torch.uint8)])


def test_rows_that_are_zero_or_missing_change_it() -> None:
    x = data(5 * ROW)
    lost = x.clone()
    lost[ROW : 2 * ROW] = 0
    assert len({checksum([each]) for each in (x, lost, torch.cat([x[:ROW], x[2 * ROW :]]))}) == 3


def test_it_is_that_of_the_formula() -> None:
    x = data(BLOCK + 2 * ROW + 13)
    words = [int.from_bytes(bytes(x[i : i + 8].tolist()).ljust(8, b"\0"), "little") for i in range(0, len(x), 8)]
    words += [0] * (-len(words) % (ROW // 8))
    rows = [words[i : i + ROW // 8] for i in range(0, len(words), ROW // 8)]
    blocks = [rows[: BLOCK // ROW], rows[BLOCK // ROW : -1], rows[-1:]]
    sums = [sum(row) for row in rows] + [sum(column) for block in blocks for column in zip(*block, strict=True)]
    text = b"".join((each % 2**64).to_bytes(8, "little") for each in sums)
    assert checksum([x]) == f"sums:{hashlib.blake2b(text, digest_size=8).hexdigest()}:{len(x)}"


def test_chunks_and_places_in_memory_make_no_difference(tmp_path: Path) -> None:
    x = data(5 * BLOCK + 3 * ROW + 100)
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), x])[3:]
    assert checksum([x]) == checksum([x[: 2 * BLOCK], x[2 * BLOCK :]]) == checksum([shifted])
    assert checksum([]) == checksum([x[:0]])
    (tmp_path / "file").write_bytes(b"before" + bytes(x.numpy()) + b"behind")
    file = os.open(tmp_path / "file", os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        assert checksum(stored_bytes(file, 6, len(x))) == checksum([x])
    finally:
        os.close(file)


@pytest.mark.parametrize("size", [BLOCK, 3 * BLOCK, 3 * BLOCK + 5 * ROW + 7, ROW + 1, 5])
def test_how_many_blocks_are_summed_at_once_makes_no_difference(size: int) -> None:
    """An accelerator sums all of them at once."""
    sums = [
        [torch.cat([words.sum(axis).reshape(-1) for words in _blocks(data(size), count)]) for axis in (-1, -2)]
        for count in (1, max(size // BLOCK, 1))
    ]
    assert all(torch.equal(one, other) for one, other in zip(*sums, strict=True))
