"""Storage of a number format's codes in an ONNX file.

The file stores numbers of an ONNX type, or indices into a table of values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import attrs
import onnx_ir as ir
import torch
from torch import Tensor

from quark.numbers import NumberFormat

__all__ = ["INTEGERS", "StoredCodes", "native_type", "stored_codes", "stored_type", "whole_ends"]

INTEGERS = (ir.DataType.INT4, ir.DataType.UINT4, ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16)
"""The ONNX integer types of 4, 8 and 16 bits. ``QuantizeLinear`` can round to each of them."""

_FLOATS = {torch.float8_e4m3fn: ir.DataType.FLOAT8E4M3FN, torch.float8_e5m2: ir.DataType.FLOAT8E5M2}
_STEP_BITS = 24
"""`_multiples` tries the powers of two 2^0, 2^-1, … as the step; this is the number of powers that it tries.
"""


@attrs.frozen(eq=False)
class StoredCodes:
    """How a file stores the codes of a weight.

    Attributes:
        type: The ONNX type of the stored numbers.
        step: A power of two. The stored number times ``step`` is the value of a code, which is still to be
            multiplied by the scale.
        table: If the stored numbers are indices, the values to which they refer; otherwise None.
        stored: Function that converts codes of the number format to stored numbers.
    """

    type: ir.DataType
    stored: Callable[[Tensor], Tensor]
    step: float = 1.0
    table: Tensor | None = None


def native_type(number_format: NumberFormat) -> ir.DataType | None:
    """Return the ONNX type to which ``QuantizeLinear`` rounds exactly like the format.

    Return None if no type fits. ``QuantizeLinear`` rounds half to even and saturates at the smallest and the
    largest number of the type.
    """
    if (kind := _FLOATS.get(number_format.storage_dtype)) is not None:
        largest = torch.finfo(number_format.storage_dtype).max
        probe = torch.cat(
            [
                torch.linspace(-2 * largest, 2 * largest, 4001, dtype=torch.float32),
                torch.logspace(-30, 10, 4001, base=2.0, dtype=torch.float32),
            ]
        )
        expected = probe.clamp(-largest, largest).to(number_format.storage_dtype).float()
        return kind if torch.equal(number_format.round_(probe.clone()), expected) else None
    ends = whole_ends(number_format)
    return next((t for t in INTEGERS if (t.min, t.max) == ends), None)


@lru_cache(maxsize=64)
def whole_ends(number_format: NumberFormat) -> tuple[int, int] | None:
    """Return the smallest and the largest code of a format that rounds to integers.

    The format must round half to even and saturate at these two codes. Return None for any other format.
    """
    ends = _ends(number_format)
    if ends is None:
        return None
    probe = _whole(4 * (ends[0] - 2), 4 * (ends[1] + 2)).float() / 4
    return ends if torch.equal(number_format.round_(probe.clone()), probe.round().clamp(*ends)) else None


@lru_cache(maxsize=64)
def stored_codes(number_format: NumberFormat) -> StoredCodes | None:
    """Return how a file stores the codes of a format, or None if an ONNX file cannot store them."""
    if number_format.storage_dtype in _FLOATS:
        return StoredCodes(_FLOATS[number_format.storage_dtype], lambda codes: codes)
    ends = _ends(number_format)
    if ends is not None:
        return StoredCodes(next(t for t in (*INTEGERS, ir.DataType.INT32) if t.min <= ends[0] and ends[1] <= t.max), lambda codes: codes)
    multiples, table = _multiples(number_format), _table(number_format)
    if table is not None and table.type == ir.DataType.UINT4:
        return table
    return multiples if table is None or (multiples is not None and multiples.type == ir.DataType.INT8) else table


def stored_type(values: Tensor, opset: int) -> tuple[ir.DataType, torch.dtype]:
    """Return the narrowest floating-point type that represents the float32 ``values`` exactly.

    Return the ONNX type and the torch dtype of the same numbers. ONNX's operator set ``opset`` can cast from
    this type.
    """
    candidates = [
        (ir.DataType.FLOAT8E4M3FN, torch.float8_e4m3fn),
        *([(ir.DataType.FLOAT8E8M0, torch.float8_e8m0fnu)] if opset >= _E8M0 else []),
        (ir.DataType.BFLOAT16, torch.bfloat16),
        (ir.DataType.FLOAT16, torch.float16),
    ]
    return next((c for c in candidates if torch.equal(values.to(c[1]).float(), values)), (ir.DataType.FLOAT, torch.float32))


_E8M0 = 24
"""The first opset that can cast from FLOAT8E8M0, which stores a power of two in one byte."""


def _ends(number_format: NumberFormat) -> tuple[int, int] | None:
    """Return the smallest and the largest code of a format whose codes are integers equal to their values.

    Return None for any other format.
    """
    dtype = number_format.storage_dtype
    if dtype.is_floating_point or number_format.is_cast:
        return None
    low, high = (int(code) for code in number_format.codes(torch.tensor([-1e30, 1e30], dtype=torch.float32)))
    if not low <= 0 < high:
        return None
    codes = _whole(low, high).to(dtype)
    is_whole = torch.equal(number_format.decode(codes), codes.float()) and torch.equal(number_format.codes(codes.float()), codes)
    return (low, high) if is_whole else None


def _whole(low: int, high: int) -> Tensor:
    """Return the integers from ``low`` to ``high`` as int64.

    If there are more than `_MOST_CODES` integers, return an evenly spaced sample. float32 represents each
    returned integer exactly.
    """
    count = min(high - low + 1, _MOST_CODES)
    return torch.linspace(low, high, count, dtype=torch.float64).round().float().to(torch.int64)


_MOST_CODES = 1 << 19
"""The largest number of values that `_whole` returns.

A probe of a 16-bit format in quarter steps needs about half as many.
"""


def _table(number_format: NumberFormat) -> StoredCodes | None:
    """Return storage as indices into a table of values.

    Return None if the codes of the format are not indices of at most 8 bits.
    """
    if number_format.storage_dtype is not torch.uint8 or number_format.is_cast:
        return None
    kind = ir.DataType.UINT4 if number_format.bits <= ir.DataType.UINT4.bitwidth else ir.DataType.UINT8
    table = number_format.decode(torch.arange(1 << math.ceil(number_format.bits), dtype=torch.uint8))
    return StoredCodes(kind, lambda codes: codes, table=table)


def _multiples(number_format: NumberFormat) -> StoredCodes | None:
    """Return storage as multiples of a power of two, each an 8-bit or 16-bit integer.

    Return None if the values of the format are not such multiples.
    """
    largest = float(number_format.round_(torch.full((32,), 1e30, dtype=torch.float32)).max())
    if number_format.is_cast or not math.isfinite(largest):
        return None
    probe = torch.cat(
        [torch.linspace(-largest, largest, 1 << 14, dtype=torch.float32), torch.logspace(-30, 10, 1 << 12, base=2.0, dtype=torch.float32)]
    )
    # A format in which neighbours share something (for example an exponent) represents two equal neighbours
    # exactly as it would each alone.
    values = number_format.decode(number_format.codes(probe.repeat_interleave(2)))
    steps = (2.0**-shift for shift in range(_STEP_BITS))
    step = next((step for step in steps if bool(((values / step) % 1 == 0).all())), None)
    if step is None or largest / step > ir.DataType.INT16.max:
        return None
    kind, dtype = (ir.DataType.INT8, torch.int8) if largest / step <= ir.DataType.INT8.max else (ir.DataType.INT16, torch.int16)
    return StoredCodes(kind, lambda codes: (number_format.decode(codes) / step).to(dtype), step)
