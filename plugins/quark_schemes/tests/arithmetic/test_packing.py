"""Packing of codes: the documented order of nibbles, and exact inverses for any length."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quark.errors import ConfigError
from quark_schemes.arithmetic.packing import (
    ORDERS,
    pack_bits,
    pack_flags,
    pack_nibbles,
    pack_nibbles_across,
    pack_two,
    unpack_bits,
    unpack_flags,
    unpack_nibbles,
)


def test_in_order_element_k_lies_in_bits_4k() -> None:
    words = pack_nibbles(torch.arange(8, dtype=torch.uint8), "order")
    assert words.tolist() == [0x76543210]


def test_reordered_elements_are_0_2_4_6_1_3_5_7_from_the_lowest_bits() -> None:
    words = pack_nibbles(torch.arange(8, dtype=torch.uint8), "reorder")
    assert words.tolist() == [0x75316420]


def test_negative_codes_are_twos_complement() -> None:
    words = pack_nibbles(torch.tensor([-8, 7, -1, 0, 0, 0, 0, 0], dtype=torch.int8), "order")
    assert words.tolist() == [0x00000F78]


def test_fp4_codes_lie_low_nibble_first() -> None:
    assert pack_two(torch.tensor([1, 10, 7, 8], dtype=torch.uint8)).tolist() == [0xA1, 0x87]


def test_six_bit_codes_are_little_endian() -> None:
    codes = torch.tensor([0b000001, 0b000010, 0b000011, 0b000100], dtype=torch.uint8)
    value = 1 | 2 << 6 | 3 << 12 | 4 << 18
    assert pack_bits(codes, 6).tolist() == list(value.to_bytes(3, "little"))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
@given(rows=st.integers(1, 3), length=st.integers(1, 40), seed=st.integers(0, 99))
def test_nibbles_come_back_whatever_the_length(order: str, dtype: torch.dtype, rows: int, length: int, seed: int) -> None:
    low = -8 if dtype is torch.int8 else 0
    codes = torch.randint(low, low + 16, (rows, length), generator=torch.Generator().manual_seed(seed)).to(dtype)
    words = pack_nibbles(codes, order)
    assert words.shape == (rows, -(-length // 8))
    assert torch.equal(unpack_nibbles(words, order, length, signed=dtype is torch.int8), codes)


@pytest.mark.parametrize("order", ORDERS)
@given(rows=st.integers(1, 40), columns=st.integers(1, 5), seed=st.integers(0, 99))
def test_packing_across_equals_packing_the_transpose(order: str, rows: int, columns: int, seed: int) -> None:
    codes = torch.randint(-8, 8, (rows, columns), generator=torch.Generator().manual_seed(seed)).to(torch.int8)
    assert torch.equal(pack_nibbles_across(codes, order), pack_nibbles(codes.t().contiguous(), order))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("signed", [True, False])
@given(length=st.integers(1, 40), seed=st.integers(0, 99))
def test_codes_of_few_bits_come_back_whatever_the_length(bits: int, signed: bool, length: int, seed: int) -> None:
    low = -(1 << (bits - 1)) if signed else 0
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(low, low + (1 << bits), (2, length), generator=g).to(torch.int8 if signed else torch.uint8)
    packed = pack_bits(codes, bits)
    period = {2: 4, 3: 8, 4: 2, 5: 8, 6: 4}[bits]
    assert packed.shape == (2, -(-length // period) * period * bits // 8)
    assert torch.equal(unpack_bits(packed, bits, length, signed=signed), codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6])
def test_codes_are_unpacked_from_bytes_in_any_order_of_memory(bits: int) -> None:
    data = torch.randint(0, 256, (8, 3 * bits), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    strided = data.t().contiguous().t()
    assert torch.equal(unpack_bits(strided, bits, 24, signed=True), unpack_bits(data, bits, 24, signed=True))


@pytest.mark.parametrize("bits", [3, 4, 5, 6])
def test_codes_of_few_bits_are_little_endian(bits: int) -> None:
    codes = torch.arange(1, 9, dtype=torch.uint8) % (1 << bits)
    value = sum(int(c) << (bits * i) for i, c in enumerate(codes))
    assert bytes(pack_bits(codes, bits).tolist()) == value.to_bytes(bits, "little")


def test_two_bit_codes_have_the_first_in_the_highest_bits() -> None:
    assert pack_bits(torch.tensor([1, 2, 3, 0], dtype=torch.uint8), 2).tolist() == [0b01101100]


@given(st.lists(st.booleans(), min_size=8, max_size=64))
def test_flags_come_back_and_the_first_is_the_lowest_bit(flags: list[bool]) -> None:
    whole = torch.tensor(flags[: len(flags) // 8 * 8], dtype=torch.uint8)
    packed = pack_flags(whole)
    assert torch.equal(unpack_flags(packed), whole)
    assert int(packed[0]) == sum(int(f) << i for i, f in enumerate(whole[:8]))


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ConfigError, match="use one of reorder, order"):
        pack_nibbles(torch.zeros(8, dtype=torch.uint8), "chaos")


def test_a_transposed_row_is_packed_as_any_other() -> None:
    """Zero points of one group in a row come so; torch takes any stride of it for contiguous."""
    codes = torch.arange(16, dtype=torch.uint8) % 8
    row = codes[:, None].t()
    assert row.stride(0) == 1
    assert torch.equal(pack_bits(row, 3), pack_bits(codes[None].clone(), 3))
