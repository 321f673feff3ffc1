"""Checks of codes: values to codes and back, and codes to bytes and back."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quark_devkit.check import check, require
from quark_devkit.checks.format.cases import COLUMNS, Case, all_codes, cases, numbers, one_case, same_bits

_ORDERS = ("reorder", "order")
_LENGTHS = (*range(1, 36), 48, 61, 64, 67, 80, 96, 128, 160)


def _values(case: Case, beyond: float = 2.0) -> Tensor:
    """Return values of the format, with shape ``[rows, COLUMNS]``."""
    return case.format.round_(numbers(case, beyond=beyond).clone())


def _codes(case: Case) -> Tensor:
    """Return codes with shape ``[rows, COLUMNS]``. If the codes of the format can be listed, up to 2^12 of
    these are included."""
    codes, listed = case.format.encode(_values(case)), all_codes(case.format)
    if listed is None:
        return codes
    some = listed[:: max(1, len(listed) // (1 << 12))]
    whole = some[torch.arange(-(-len(some) // COLUMNS) * COLUMNS) % len(some)]
    return torch.cat([codes.view(torch.uint8), whole.view(-1, COLUMNS).view(torch.uint8)]).view(codes.dtype)


@check("format", each=one_case)
def encodes_in_the_storage_dtype(case: Case) -> None:
    """Codes have the shape of the values and the dtype ``storage_dtype``; decoding gives float32."""
    values = _values(case)
    codes = case.format.encode(values.clone())
    require(codes.dtype is case.format.storage_dtype, f"encodes to {codes.dtype}, but declares storage_dtype={case.format.storage_dtype}")
    require(codes.shape == values.shape, f"encodes values of shape {list(values.shape)} to codes of shape {list(codes.shape)}")
    decoded = case.format.decode(codes)
    require(decoded.dtype is torch.float32, f"decodes to {decoded.dtype}, not float32")
    require(decoded.shape == values.shape, f"decodes codes of shape {list(values.shape)} to values of shape {list(decoded.shape)}")


@check("format", each=cases)
def decodes_what_it_encodes(case: Case) -> None:
    """Every value that rounding returns, also for numbers far outside the range, has a code that decodes to
    the same value."""
    values = torch.cat([_values(case), _values(case, beyond=100.0)])
    decoded = case.format.decode(case.format.encode(values.clone()))
    wrong = values != decoded
    require(not bool(wrong.any()), f"encodes {values[wrong][:1].tolist()} to a code that stands for {decoded[wrong][:1].tolist()}")


@check("format", each=cases)
def gives_the_codes_of_rounded_values(case: Case) -> None:
    """``codes(t)`` returns and ``write_codes`` writes the same codes as ``encode(round_(t))``."""
    t = numbers(case, beyond=4)
    one, other = case.format.codes(t.clone()), case.format.encode(case.format.round_(t.clone()))
    require(same_bits(one, other), "returns different codes when it encodes in one step instead of after rounding")
    written = torch.empty_like(other)
    case.format.write_codes(t.clone(), None, written)
    require(same_bits(written, other), "writes different codes in one step than after rounding")


@check("format", each=one_case)
def leaves_values_and_codes_as_they_are(case: Case) -> None:
    """Encoding does not change the values, and decoding does not change the codes."""
    values = _values(case)
    before = values.clone()
    codes = case.format.encode(values)
    require(torch.equal(values, before), "changes the values that it encodes")
    held = codes.clone()
    case.format.decode(codes)
    require(same_bits(codes, held), "changes the codes that it decodes")


def _shapes(case: Case) -> Iterator[tuple[int, ...]]:
    """Yield shapes that the spec accepts: rows of many lengths, one row, a vector, three dimensions."""
    for length in _LENGTHS:
        for shape in ((3, length), (length,), (2, 3, length), (32, length), (1, length)):
            if case.quantizer.shape_error(shape) is None:
                yield shape


@check("format", each=cases)
def packs_without_loss(case: Case) -> None:
    """Unpacking restores all packed codes, to the bit, for rows of every accepted length and in both packing
    orders.
    """
    pool = _codes(case)
    for shape in _shapes(case):
        codes = _taken(pool, shape)
        for order in _ORDERS:
            packed = case.format.packing.pack(codes.clone(), case.quantizer.granularity, order)
            back = case.format.packing.unpack(packed, case.quantizer.granularity, order, shape)
            require(same_bits(back, codes), f"loses codes of shape {list(shape)} by packing them in the order '{order}'")
    shape = (len(pool), COLUMNS)
    if case.quantizer.shape_error(shape) is None:
        packed = case.format.packing.pack(pool.clone(), case.quantizer.granularity, "reorder")
        back = case.format.packing.unpack(packed, case.quantizer.granularity, "reorder", shape)
        require(same_bits(back, pool), "loses some of its codes by packing them")


def _taken(pool: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return codes of the given shape. They come from the start of rows, so that neighbours stay together."""
    rows, length = max(1, torch.Size(shape[:-1]).numel()), shape[-1]
    wide = pool.view(torch.uint8).view(len(pool), -1).repeat(1, -(-length // COLUMNS))
    picked = torch.arange(rows) * 7 % len(pool)
    itemsize = pool.dtype.itemsize
    return wide[picked][:, : length * itemsize].contiguous().view(pool.dtype).reshape(shape)


@check("format", each=cases)
def packs_meta_tensors(case: Case) -> None:
    """Packing accepts meta tensors of codes and scales, and the results have the same shapes and dtypes as
    for tensors with data."""
    pool = _codes(case)
    for shape in [s for s in _shapes(case) if len(s) == 2][::5]:
        codes = _taken(pool, shape)
        qparams = case.quantizer.empty_qparams(shape, "cpu")
        for order in _ORDERS:
            data = case.quantizer.pack(codes, qparams, order=order)
            meta = case.quantizer.pack(codes.to("meta"), qparams.map(lambda x: x.to("meta")), order=order)
            known, wanted = _described(meta), _described(data)
            require(known == wanted, f"packs meta tensors of shape {list(shape)} to {known}, but data to {wanted}")


def _described(tensors: dict[str, Tensor]) -> dict[str, tuple[list[int], str]]:
    return {name or "codes": (list(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()}


@check("format", each=cases)
def stores_as_many_bits_as_it_says(case: Case) -> None:
    """Packed codes take ``bits`` per element, plus at most eight bytes at the end of each row."""
    shape = (64, 64)
    packed = case.format.packing.pack(_taken(_codes(case), shape), case.quantizer.granularity, "reorder")
    stored, said = packed.numel() * packed.element_size() * 8, case.format.bits * 64 * 64
    require(said <= stored <= said + 64 * 64, f"stores {stored / 4096:.4g} bits for an element, but declares bits={case.format.bits}")


@check("format", each=cases)
def scales_survive_packing(case: Case) -> None:
    """Scales and zero points survive packing to the bit, under separate names."""
    if case.quantizer.is_float or case.is_scale:
        return
    shape = (64, 64)
    x = torch.randn(shape) * 2.0 ** torch.linspace(-9, 9, 64)[:, None]
    qparams = case.quantizer.find_qparams(x)
    for order in _ORDERS:
        packed = case.quantizer.pack_qparams(qparams, order=order)
        require("" not in packed, "stores scales under the name of the codes")
        back = dict(case.quantizer.unpack_qparams(packed, shape, order=order).items())
        for name, tensor in qparams.items():
            same = name in back and back[name].shape == tensor.shape and torch.equal(back[name].float(), tensor.float())
            require(same, f"loses the {name} of a tensor by packing it")
