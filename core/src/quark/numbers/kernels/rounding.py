"""A kernel that rounds a tensor in one pass, or decodes codes.

Elements that share a scale form runs (`quark.numbers.kernels.Runs`). A Triton program processes a tile. A
tile contains several short runs or a part of a long run. So loads and stores have consecutive addresses, and
a scale is loaded once for each run of a tile. If each run has its own scale and fits into a tile, the same
pass can also compute the scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
import triton
import triton.language as tl
from torch import Tensor

from quark.numbers.kernels import DeviceCode, DeviceFunction, Runs, launching_on
from quark.numbers.kernels.arithmetic import bits_of, bounded, float_of

TILE = 2048
"""Elements of a program: 16 for each thread of four warps. In 16-bit dtypes, these are two loads of 16 bytes.
"""
LONGEST_RUN = 1 << 15
"""Maximum length of a run whose scale the kernel finds: 64 registers of each thread of 16 warps."""
MOST_WARPS = 16
_LARGEST_OF_NARROW = 2.0**120


@triton.jit
def _extremes(x, is_inside, IS_SYMMETRIC: tl.constexpr):
    """Return the smallest and the largest value of each row of ``x``.

    If ``IS_SYMMETRIC`` is set, return minus and plus the largest magnitude of each row instead. For a row
    that contains NaN, both results are NaN.
    """
    # The bits of magnitudes have the order of the magnitudes, with NaN last. So a maximum of bits keeps NaN,
    # which a maximum of floats would lose.
    largest = float_of(tl.max(tl.where(is_inside, bits_of(x) & 0x7FFFFFFF, 0), 1))
    if IS_SYMMETRIC:
        low, high = -largest, largest
    else:
        low = tl.min(tl.where(is_inside, x, float("inf")), 1)
        high = tl.max(tl.where(is_inside, x, float("-inf")), 1)
        low, high = tl.where(largest != largest, largest, low), tl.where(largest != largest, largest, high)
    return low, high


@triton.jit
def _relative_scales(high, outer, ROUND: tl.constexpr, P: tl.constexpr, LARGEST: tl.constexpr, IN_ONE_DIVISION: tl.constexpr):
    """Return the inner scales of a two-level quantizer, in units of the outer scale.

    Each scale is for elements with magnitudes up to ``high``. The scales are rounded to their own number
    format.
    """
    relative = tl.div_rn(high, outer * LARGEST) if IN_ONE_DIVISION else tl.div_rn(tl.div_rn(high, LARGEST), outer)
    scale = ROUND(relative, None, P)
    return tl.where(scale == 0, 1.0, scale)


@triton.jit
def _rounded(
    x,
    scale,
    zero,
    ROUND: tl.constexpr,
    ENCODE: tl.constexpr,
    P: tl.constexpr,
    BY_RECIPROCAL: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Round ``x`` with the scales ``scale``, and return float32 values, or codes if ``ENCODE`` is set.

    If ``ROUND`` is None, ``x`` must be rounded already and must be in units of the scales.
    """
    t = x
    if ROUND is not None:
        t = x * tl.div_rn(1.0, scale) if BY_RECIPROCAL else tl.div_rn(x, scale)
        t = ROUND(t, zero, P)
    if ENCODE is not None:
        result = ENCODE(t, P)
    else:
        if zero is not None:
            t = t - zero
        result = t * scale
        if LIMIT is not None:
            result = bounded(result, -LIMIT, LIMIT)
    return result


@triton.jit
def round_runs(
    x_ptr,  # the tensor, contiguous; one-byte codes if a table is given
    table_ptr,  # the value of each byte in units of scales, float32; None to round
    out_ptr,  # its values or codes, contiguous; may be x; None to find only scales
    scale_ptr,  # scales: read, or written if SCALES is given
    zero_ptr,  # zero points likewise, or None
    outer_ptr,  # one outer scale, or None
    count,  # runs
    length,  # elements of a run
    period,  # run r has scale number r // span · period + r % period
    span,
    ROUND: tl.constexpr,  # None with a table
    ENCODE: tl.constexpr,  # None for values
    P: tl.constexpr,
    SCALES: tl.constexpr,  # finds scales; None if they are given
    ZEROS: tl.constexpr,
    SCALES_P: tl.constexpr,
    LARGEST: tl.constexpr,  # of an element, if SCALES rounds scales relative to the outer one; else None
    IN_ONE_DIVISION: tl.constexpr,
    IS_SYMMETRIC: tl.constexpr,
    BY_RECIPROCAL: tl.constexpr,
    LIMIT: tl.constexpr,  # largest value of a narrow dtype, else None
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Round ``x`` and write ``(round(x / scale, zero) − zero) · scale``, or write the codes of these values.

    With a table, write ``(table[x] − zero) · scale`` instead.
    """
    blocks = tl.cdiv(length, COLUMNS)
    run = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    left = tl.program_id(0) % blocks * COLUMNS
    column = tl.arange(0, COLUMNS)
    is_run = run < count
    is_inside = is_run[:, None] & (column < length - left)[None, :]
    place = (run.to(tl.int64) * length + left)[:, None] + column[None, :]
    number = run // span * period + run % period
    x = tl.load(x_ptr + place, mask=is_inside, other=0)
    x = x.to(tl.float32) if table_ptr is None else tl.load(table_ptr + x.to(tl.int32))
    zero = None
    if SCALES is None:
        scale = tl.load(scale_ptr + number, mask=is_run, other=1.0).to(tl.float32)
        if zero_ptr is not None:
            zero = tl.load(zero_ptr + number, mask=is_run, other=0).to(tl.float32)
    else:
        low, high = _extremes(x, is_inside, IS_SYMMETRIC)
        if LARGEST is None:
            scale = SCALES(low, high, SCALES_P)
        else:
            scale = _relative_scales(high, tl.load(outer_ptr), SCALES, SCALES_P, LARGEST, IN_ONE_DIVISION)
        tl.store(scale_ptr + number, scale.to(scale_ptr.dtype.element_ty), mask=is_run)
        if ZEROS is not None:
            zero = ZEROS(low, scale, SCALES_P)
            tl.store(zero_ptr + number, zero.to(zero_ptr.dtype.element_ty), mask=is_run)
    if out_ptr is not None:
        if outer_ptr is not None:
            scale = scale * tl.load(outer_ptr)
        if zero_ptr is not None:
            zero = zero[:, None]  # type: ignore[index]
        result = _rounded(x, scale[:, None], zero, ROUND, ENCODE, P, BY_RECIPROCAL, LIMIT)
        tl.store(out_ptr + place, result.to(out_ptr.dtype.element_ty), mask=is_inside)


@attrs.frozen(kw_only=True)
class Finding:
    """The functions and parameters with which `launch` computes scales.

    Attributes:
        scales: The function ``scales`` of a `quark.numbers.kernels.DeviceCode`. If ``largest`` is set, it is
            instead the function ``round`` that rounds the scales to their own number format.
        zeros: The function ``zeros`` of a `quark.numbers.kernels.DeviceCode`, or None.
        parameters: The argument P of ``scales`` and ``zeros``.
        is_symmetric: Whether ranges are symmetric about 0. If not, a range reaches from the smallest to the
            largest value.
        largest: The largest magnitude of an element if scales are relative to an outer scale. Otherwise None.
        in_one_division: Whether relative scales are ``high / (outer · largest)``. If not, they are ``high /
            largest / outer``. The second formula rounds twice.
    """

    scales: DeviceFunction
    zeros: DeviceFunction | None
    parameters: Any
    is_symmetric: bool
    largest: float | None = None
    in_one_division: bool = False


def launch(
    code: DeviceCode,
    x: Tensor,
    out: Tensor | None,
    qparams: Sequence[Tensor | None],
    runs: Runs,
    *,
    by_reciprocal: bool,
    encode: bool = False,
    finding: Finding | None = None,
    table: Tensor | None = None,
) -> None:
    """Round ``x`` with the scales, zero points and outer scale in ``qparams``, and write the result to
    ``out``.

    All tensors must be contiguous and on the same device.

    Args:
        code: The arithmetic of the number format.
        x: The float32, float16 or bfloat16 values to round. If ``table`` is set, uint8 codes.
        out: The tensor for the results, or None to compute only scales. Values can have the same dtypes as
            ``x``.
        qparams: Three tensors: the scales, the zero points and the outer scale. Scales have the dtype float32
            or a narrower dtype. Zero points are int32 or float32, or None. The outer scale is float32 or
            None. If ``finding`` is set, the kernel writes scales and zero points instead of reading them.
        runs: The rule that maps elements to scales. If ``finding`` is set, each run must have its own scale
            and at most `LONGEST_RUN` elements.
        by_reciprocal: Whether scaled values are ``x · (1 / scale)`` instead of ``x / scale``.
        encode: Whether to write codes to ``out``.
        finding: How to compute the scales, or None if ``qparams`` contains them already.
        table: The float32 values ``[256]`` of all codes. If it is set, ``x`` is decoded and not rounded.
    """
    columns = triton.next_power_of_2(runs.length)
    if finding is None:
        columns = min(columns, TILE)
    rows = max(1, TILE // columns)
    count = x.numel() // runs.length
    grid = (triton.cdiv(count, rows) * triton.cdiv(runs.length, columns),)
    limit = float("inf") if out is None or encode else torch.finfo(out.dtype).max
    with launching_on(x.device):
        round_runs[grid](
            x,
            table,
            out,
            *qparams,
            count,
            runs.length,
            1 if runs.have_own_scales else runs.period,
            1 if runs.have_own_scales else runs.span,
            ROUND=code.round if table is None else None,
            ENCODE=code.encode if encode else None,
            P=code.parameters,
            SCALES=None if finding is None else finding.scales,
            ZEROS=None if finding is None else finding.zeros,
            SCALES_P=None if finding is None else finding.parameters,
            LARGEST=None if finding is None else finding.largest,
            IS_SYMMETRIC=finding is not None and finding.is_symmetric,
            IN_ONE_DIVISION=finding is not None and finding.in_one_division,
            BY_RECIPROCAL=by_reciprocal,
            LIMIT=limit if limit < _LARGEST_OF_NARROW else None,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=min(max(rows * columns // 512, 4), MOST_WARPS),
            enable_fp_fusion=False,
        )
