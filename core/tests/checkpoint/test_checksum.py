"""A checksum finds damage to a word, and to pages of a file, however the bytes are read."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quark.checkpoint.checksum import ROW, checksum


def data(size: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 3 * ROW), st.integers(0, 2**32 - 1), st.data())
def test_a_change_of_one_byte_or_of_the_length_changes_it(size: int, seed: int, draw: st.DataObject) -> None:
    x = data(size, seed)
    assert checksum([x[:-1]]) != checksum([x]) or not size
    if size:
        other, place = x.clone(), draw.draw(st.integers(0, size - 1))
        other[place] += draw.draw(st.integers(1, 255))
        assert checksum([other]) != checksum([x])


def test_rows_that_are_zero_or_exchanged_change_it() -> None:
    x = data(5 * ROW)
    lost, moved = x.clone(), x.clone()
    lost[ROW : 2 * ROW] = 0
    moved[: 2 * ROW] = x[: 2 * ROW].view(2, ROW).flip(0).reshape(-1)
    assert len({checksum([each]) for each in (x, lost, moved)}) == 3


def test_it_is_that_of_the_formula() -> None:
    x = data(2 * ROW + 13)
    words = [int.from_bytes(bytes(x[i : i + 8].tolist()).ljust(8, b"\0"), "little") for i in range(0, len(x), 8)]
    expected = sum(word * (2 * (i * 8 // ROW) + 1) for i, word in enumerate(words)) % 2**64
    assert checksum([x]) == f"sum64:{expected:016x}:{len(x)}"


def test_chunks_and_places_in_memory_make_no_difference() -> None:
    x = data(3 * ROW + 100)
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), x])[3:]
    assert checksum([x]) == checksum([x[: 2 * ROW], x[2 * ROW :]]) == checksum([shifted])
    assert checksum([]) == checksum([x[:0]])
