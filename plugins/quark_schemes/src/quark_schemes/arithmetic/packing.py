"""Pure functions that pack codes into the words and bytes of a checkpoint, and unpack them.

Unpacking exactly reverses packing. All functions also accept meta tensors.

Source: checkpoints of AMD Quark 0.13. The order of 4-bit codes in a word is from AutoAWQ.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quark.base.parallel import parallel_map, row_slices
from quark.errors import ConfigError
from quark.numbers.kernels import uses_kernels

__all__ = [
    "ORDERS",
    "check_order",
    "pack_bits",
    "pack_flags",
    "pack_nibbles",
    "pack_nibbles_across",
    "pack_two",
    "unpack_bits",
    "unpack_flags",
    "unpack_nibbles",
    "unpack_nibbles_across",
]

ORDERS = ("reorder", "order")
_PART = 1 << 19
"""Number of codes that one thread packs at a time; they fit into the second-level cache."""
_WORD = 8
_BYTES = {"order": ((0, 1), (2, 3), (4, 5), (6, 7)), "reorder": ((0, 2), (4, 6), (1, 3), (5, 7))}
"""Packing order → for each byte of a word, the indices of the codes in its low and its high nibble."""


def check_order(order: str) -> None:
    """Raise ConfigError unless ``order`` is one of `ORDERS`."""
    if order not in ORDERS:
        raise ConfigError(f"pack_method {order!r} is unknown: use one of {', '.join(ORDERS)}")


def pack_nibbles(codes: Tensor, order: str) -> Tensor:
    """Pack 4-bit codes along the last axis, eight in an int32 word: ``[…, K] → […, ceil(K / 8)]``.

    If K is not a multiple of 8, the last word is filled up with codes 0.

    Args:
        codes: int8 or uint8. Only the low four bits of each code are packed, in two's complement.
        order: ``"order"`` puts code *k* of a word into the bits 4k to 4k + 3 of the word. ``"reorder"`` puts
            the codes in the order 0, 2, 4, 6, 1, 3, 5, 7, and the first of them into the lowest bits.
    """
    check_order(order)
    if uses_kernels(codes.device):
        from quark_schemes.kernels.packing import NIBBLES, REORDERED_NIBBLES, packed

        return packed(codes, REORDERED_NIBBLES if order == "reorder" else NIBBLES)
    length = codes.shape[-1]
    nibbles = codes.view(torch.uint8).bitwise_and(0xF)
    if length % _WORD:
        nibbles = torch.nn.functional.pad(nibbles, (0, -length % _WORD))
    # Element 4p + 2q + r. In order, byte (p, q) holds r = 0, 1; reordered, byte (r, p) holds q = 0, 1.
    elements = nibbles.reshape(*nibbles.shape[:-1], -1, 2, 2, 2)
    low, high = (elements.movedim(-1, -3) if order == "reorder" else elements).flatten(-3, -2).unbind(-1)
    # Four bytes, lowest first, are one little-endian word.
    words = (low | high.bitwise_left_shift(4)).contiguous()
    return words.view(torch.int32).reshape(*codes.shape[:-1], -1)


def pack_nibbles_across(codes: Tensor, order: str) -> Tensor:
    """Return ``pack_nibbles(codes.T, order)`` for codes ``[O, I]``, but faster.

    The result is ``[I, ceil(O / 8)]``.

    The function packs codes of eight rows into words first, and then transposes the words. There are eight
    times fewer words than codes.
    """
    check_order(order)
    if uses_kernels(codes.device):
        from quark_schemes.kernels.packing import NIBBLES, REORDERED_NIBBLES, packed_across

        return packed_across(codes, REORDERED_NIBBLES if order == "reorder" else NIBBLES)
    rows = codes.view(torch.uint8)
    if codes.shape[0] % _WORD:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, -codes.shape[0] % _WORD))
    rows = rows.reshape(-1, _WORD, codes.shape[1])
    words = torch.empty(rows.shape[0], rows.shape[2], dtype=torch.int32, device=codes.device)
    # Eight adjacent codes are processed as one int64 if shape and offset allow it.
    lanes = rows.view(torch.int64) if rows.shape[2] % 8 == 0 and rows.storage_offset() % 8 == 0 else rows
    mask = 0x0F0F0F0F0F0F0F0F if lanes.dtype is torch.int64 else 0xF
    _by_parts(
        lambda part: _combined(lanes[part].bitwise_and(mask), order, words[part]), rows.shape[0], _WORD * codes.shape[1], codes.device
    )
    return words.t().contiguous()


def _combined(nibbles: Tensor, order: str, out: Tensor) -> None:
    """Combine the low four bits of the codes in eight rows into words.

    ``nibbles`` has the shape ``[n, 8, I]``. The words are written to ``out``, which has the shape ``[n, I]``.
    """
    for byte, (low, high) in enumerate(_BYTES[order]):
        pair = nibbles[:, high].bitwise_left_shift(4).bitwise_or_(nibbles[:, low]).view(torch.uint8)
        if byte == 0:
            out.copy_(pair)
        else:
            out.bitwise_or_(pair.to(torch.int32).bitwise_left_shift_(8 * byte))


def _by_parts(work: Callable[[slice], object], rows: int, length: int, device: torch.device) -> None:
    """Split ``rows`` rows of ``length`` elements into slices, and call ``work`` on each, in several threads.

    On a CPU, the slices are so small that temporary tensors fit into the caches.
    """
    parallel_map(work, row_slices(rows, length, _PART if device.type == "cpu" else rows * length), device)


def unpack_nibbles(words: Tensor, order: str, length: int, *, signed: bool) -> Tensor:
    """Undo `pack_nibbles`: return the first ``length`` codes along the last axis.

    The codes are int8 if ``signed``, else uint8.
    """
    check_order(order)
    if uses_kernels(words.device):
        from quark_schemes.kernels.packing import NIBBLES, REORDERED_NIBBLES, unpacked

        return unpacked(words, REORDERED_NIBBLES if order == "reorder" else NIBBLES, length, signed=signed)
    data = words.reshape(-1).view(torch.uint8)
    pairs = torch.stack((data & 0xF, data >> 4), dim=-1).reshape(*words.shape, 2, 2, 2)
    nibbles = (pairs.movedim(-3, -1) if order == "reorder" else pairs).reshape(*words.shape[:-1], -1)[..., :length]
    if not signed:
        return nibbles.contiguous()
    # Bit 3 is the sign: move it to bit 7 and let the arithmetic shift spread it.
    return (nibbles << 4).view(torch.int8) >> 4


def unpack_nibbles_across(words: Tensor, order: str, rows: int, *, signed: bool) -> Tensor:
    """Undo `pack_nibbles_across`: unpack words ``[I, ceil(rows / 8)]`` to codes ``[rows, I]``.

    The codes are int8 if ``signed``, else uint8.
    """
    check_order(order)
    if uses_kernels(words.device):
        from quark_schemes.kernels.packing import NIBBLES, REORDERED_NIBBLES, unpacked_across

        return unpacked_across(words, REORDERED_NIBBLES if order == "reorder" else NIBBLES, rows, signed=signed)
    # Transpose the words: there are eight times fewer words than codes. Each word then gives one code to each
    # of eight rows.
    lines = words.t().contiguous()
    codes = torch.empty(lines.shape[0], _WORD, lines.shape[1], dtype=torch.int8 if signed else torch.uint8, device=words.device)

    # Shift a code left to the sign bit, then right again: the second shift extends the sign.
    places = sorted((row, 28 - 8 * byte - 4 * high) for byte, pair in enumerate(_BYTES[order]) for high, row in enumerate(pair))
    shifts = torch.tensor([shift for _, shift in places], dtype=torch.int32, device=words.device)[:, None]

    def unpack(part: slice) -> None:
        nibbles = lines[part, None].bitwise_left_shift(shifts).bitwise_right_shift_(28)
        codes[part] = nibbles if signed else nibbles.bitwise_and_(0xF)

    _by_parts(unpack, lines.shape[0], _WORD * lines.shape[1], words.device)
    return codes.view(-1, lines.shape[1])[:rows]


def pack_two(codes: Tensor) -> Tensor:
    """Pack 4-bit codes along the last axis, two in a byte: ``[…, K] → […, ceil(K / 2)]`` uint8.

    The code at an even index is in the low half of the byte.
    """
    if uses_kernels(codes.device):
        from quark_schemes.kernels.packing import PAIRS, packed

        return packed(codes, PAIRS)
    # Read two bytes as one little-endian number. The odd code is eight bits above the even code in this
    # number, and must be four bits above it.
    pairs = _whole(codes, 2).contiguous().view(torch.int16)
    result = torch.empty(pairs.shape, dtype=torch.uint8, device=codes.device)
    flat, target = pairs.view(-1), result.view(-1)

    def pack(part: slice) -> None:
        masked = flat[part].bitwise_and(0x0F0F)
        target[part] = masked.bitwise_right_shift(4).bitwise_or_(masked)

    _by_parts(pack, flat.numel(), 1, codes.device)
    return result


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack codes of 2 to 6 bits into bytes along the last axis. The last bytes are filled up with codes 0.

    Four 2-bit codes share a byte, with the first code in the highest bits. Codes of other sizes form groups
    that fill whole bytes, with the first code in the lowest bits. Codes ``[…, K]`` become uint8 ``[…, n]``,
    with the smallest n for which n bytes have all bits and only whole groups.
    """
    if bits == 4:
        return pack_two(codes)
    if bits == 2 and uses_kernels(codes.device):
        from quark_schemes.kernels.packing import TWO_BITS, packed

        return packed(codes, TWO_BITS)
    if bits == 2:
        a, b, c, d = _whole(codes.view(torch.uint8), 4).bitwise_and(3).reshape(*codes.shape[:-1], -1, 4).unbind(-1)
        return (a << 6) | (b << 4) | (c << 2) | d
    return _folded(codes, bits)[..., : -(-codes.shape[-1] // _PERIODS[bits]) * _PERIODS[bits] * bits // 8]


def _folded(codes: Tensor, bits: int) -> Tensor:
    """Take the lowest ``bits`` bits of each code, and join them to a sequence of bits in bytes.

    The first code is in the lowest bits of the first byte. The number of codes is filled up with codes 0 to a
    multiple of eight: ``[…, K] → […, bits · ceil(K / 8)]`` uint8.
    """
    # Eight codes are one number. Adjacent fields of 8 bits move together, then fields of 16 and of 32 bits.
    whole = _whole(codes.view(torch.uint8), 8).contiguous()
    # Use one row: torch calls a transposed row of any stride contiguous, but views it as another dtype only
    # if the stride is 1.
    eights = whole.view(-1).view(torch.int64).view(*whole.shape[:-1], -1)
    for width in (8, 16, 32):
        used = bits * width // 8
        low = sum(((1 << used) - 1) << place for place in range(0, 64, 2 * width))
        eights = eights.bitwise_and(low).bitwise_or_(eights.bitwise_and(low << width).bitwise_right_shift_(width - used))
    return eights.unsqueeze(-1).view(torch.uint8)[..., :bits].flatten(-2)


def unpack_bits(data: Tensor, bits: int, length: int, *, signed: bool) -> Tensor:
    """Undo `pack_bits`: return the first ``length`` codes, int8 if ``signed``, else uint8."""
    if bits in (2, 4) and uses_kernels(data.device):
        from quark_schemes.kernels.packing import PAIRS, TWO_BITS, unpacked

        return unpacked(data, PAIRS if bits == 4 else TWO_BITS, length, signed=signed)
    if bits == 4:
        # Each byte becomes an int16, and its high half moves to the upper byte.
        pairs = data.to(torch.int16, memory_format=torch.contiguous_format)
        codes = pairs.bitwise_left_shift(4).bitwise_or_(pairs).bitwise_and_(0x0F0F).view(torch.uint8)
    elif bits == 2:
        codes = torch.stack([(data >> shift) & 0x3 for shift in (6, 4, 2, 0)], dim=-1)
    else:
        codes = _unfolded(data, bits)
    unsigned = codes.reshape(*data.shape[:-1], -1)[..., :length]
    return (unsigned << (8 - bits)).view(torch.int8) >> (8 - bits) if signed else unsigned


_PERIODS = {2: 4, 3: 8, 5: 8, 6: 4}
"""Bits of a code → the smallest number of codes that fill whole bytes."""


def _whole(codes: Tensor, period: int) -> Tensor:
    """Append zeros to the last axis of ``codes`` until the length is a multiple of ``period``."""
    return torch.nn.functional.pad(codes, (0, -codes.shape[-1] % period)) if codes.shape[-1] % period else codes


def pack_flags(flags: Tensor) -> Tensor:
    """Pack flags (uint8, 0 or 1) along the last axis, eight in a byte: ``[…, 8 K] → […, K]``.

    The first flag is in the lowest bit.
    """
    return _folded(flags, 1)


def unpack_flags(data: Tensor) -> Tensor:
    """Undo `pack_flags`: return the flags as uint8."""
    return _unfolded(data, 1)


def _unfolded(data: Tensor, bits: int) -> Tensor:
    """Undo `_folded`: return each code in a byte of its own.

    A group of ``bits`` bytes becomes eight codes; the last group may lack bytes.
    """
    if bits == 1:
        eights = data.to(torch.int64, memory_format=torch.contiguous_format)
    else:
        groups = _whole(data, bits).unflatten(-1, (-1, bits))
        eights = torch.nn.functional.pad(groups, (0, 8 - bits)).view(torch.int64).squeeze(-1)
    for width in (32, 16, 8):
        used = bits * width // 8
        low = sum(((1 << used) - 1) << place for place in range(0, 64, 2 * width))
        eights = eights.bitwise_and(low << used).bitwise_left_shift_(width - used).bitwise_or_(eights.bitwise_and(low))
    return eights.view(torch.uint8)
