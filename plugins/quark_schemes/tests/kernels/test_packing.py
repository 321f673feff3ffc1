"""The kernels that pack and unpack codes give the bytes that torch's operations give, whatever the shape."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quark_schemes.arithmetic.packing import (
    ORDERS,
    pack_bits,
    pack_nibbles,
    pack_nibbles_across,
    pack_two,
    unpack_bits,
    unpack_nibbles,
    unpack_nibbles_across,
)
from tests.kit.interpreted_kernels import Kernels

PACKERS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    **{f"nibbles, {order}": ((lambda x, o=order: pack_nibbles(x, o)), 16) for order in ORDERS},  # type: ignore[misc]
    **{f"nibbles across, {order}": ((lambda x, o=order: pack_nibbles_across(x, o)), 16) for order in ORDERS},  # type: ignore[misc]
    "pairs": (pack_two, 16),
    "two bits": (lambda x: pack_bits(x, 2), 4),
}


UNPACKERS: dict[str, Callable[[Tensor, tuple[int, int], bool], Tensor]] = {
    **{f"nibbles, {o}": (lambda x, shape, signed, o=o: unpack_nibbles(x, o, shape[1], signed=signed)) for o in ORDERS},  # type: ignore[misc]
    **{f"nibbles across, {o}": (lambda x, shape, signed, o=o: unpack_nibbles_across(x, o, shape[0], signed=signed)) for o in ORDERS},  # type: ignore[misc]
    "pairs": lambda x, shape, signed: unpack_bits(x, 4, shape[1], signed=signed),
    "two bits": lambda x, shape, signed: unpack_bits(x, 2, shape[1], signed=signed),
}


@pytest.mark.parametrize("shape", [(16, 32), (70, 150), (3, 5), (1, 1)], ids=str)
@pytest.mark.parametrize("name", PACKERS)
def test_bytes_are_the_same(kernels: Kernels, name: str, shape: tuple[int, int]) -> None:
    pack, values = PACKERS[name]
    codes = torch.randint(0, values, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    expected = pack(codes)
    with kernels.on() as device:
        found = pack(codes.to(device))
    assert found.dtype is expected.dtype
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("shape", [(16, 32), (70, 150), (3, 5), (1, 1)], ids=str)
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("name", PACKERS)
def test_codes_come_back(kernels: Kernels, name: str, signed: bool, shape: tuple[int, int]) -> None:
    pack, values = PACKERS[name]
    codes = torch.randint(0, values, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    words = pack(codes)
    expected = UNPACKERS[name](words, shape, signed)
    with kernels.on() as device:
        found = UNPACKERS[name](words.to(device), shape, signed)
        strided = UNPACKERS[name](words.to(device).t().contiguous().t(), shape, signed)
    assert (found.dtype, found.is_contiguous()) == (expected.dtype, True)
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(strided.cpu(), expected)
    assert signed or torch.equal(expected, codes)


def test_signed_codes_keep_their_lowest_bits_alone(kernels: Kernels) -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8).reshape(2, 8)
    expected = pack_nibbles(codes, "order")
    with kernels.on() as device:
        assert torch.equal(pack_nibbles(codes.to(device), "order").cpu(), expected)
        strided = torch.zeros(8, 2, dtype=torch.int8, device=device).t().copy_(codes)
        assert torch.equal(pack_nibbles(strided, "order").cpu(), expected)
