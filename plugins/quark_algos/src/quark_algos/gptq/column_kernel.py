"""A kernel that rounds a block of columns. It is the inner loop of `quark_algos.gptq.gptq`.

A column is rounded when the errors of all earlier columns have been compensated. Each program works on a few
rows of the weight, and loads the part of the block in these rows into registers. The program rounds one
column after another, and adds each error to all later columns at once. So each row is read only once, and no
kernel is launched per column. The sums have the same terms as in the implementation with torch's operations,
but the kernel computes them with fused multiply-adds, in the order of the columns. Results differ only for
this reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from quark.numbers import ColumnRounder
from quark.numbers.kernels import launching_on
from quark_algos.gptq.damping import Factor

if TYPE_CHECKING:
    from quark_algos.gptq.gptq import Swept

__all__ = ["round_block"]

ROWS = 8
"""Number of rows per program. A column then has 32 bytes, which is a sector of memory. A program is one warp,
so sums over the block need no barrier.
"""


@triton.jit
def _taken(tile, is_now):
    """Return one column ``[ROWS]`` of a tile ``[BLOCK, ROWS]``. ``is_now`` is a mask that is True for this
    column only.

    The values of other columns are not used, so they may be NaN.
    """
    return tl.sum(tl.where(is_now[:, None], tile, 0.0), 0)


@triton.jit
def _plus_outer_product(tile, of_columns, of_rows):
    """Return ``tile`` plus the outer product of two vectors. A fused multiply-add rounds each element only
    once.
    """
    return tl.fma(tl.broadcast_to(of_columns[:, None], tile.shape), tl.broadcast_to(of_rows[None, :], tile.shape), tile)


@triton.jit
def _on_grid(t, factor, scale, zero, ROUND: tl.constexpr, P: tl.constexpr, BY_RECIPROCAL: tl.constexpr):
    """Return the grid values to which the values ``t`` of one column are rounded."""
    q = ROUND(t * factor if BY_RECIPROCAL else tl.div_rn(t, factor), zero, P)
    if zero is not None:
        q = q - zero
    return q * scale


@triton.jit(do_not_specialize=["columns", "start", "first"])
def _round_columns(
    base_ptr,  # [columns, rows]: values to round, without feedback inside the block; all tensors are contiguous
    weight_ptr,  # [columns, rows]: the original weight
    feedback_ptr,  # [columns, columns]: row k has the factors by which the error of column k is added to later columns
    causal_ptr,  # [columns, columns]: row k has the factors for the value t of column k; or None
    t_ptr,  # [columns, rows]: written if there is a causal_ptr
    factor_ptr,  # scales or their inverses [groups, rows]
    scale_ptr,
    zero_ptr,
    order_ptr,  # the channel of each column, or None
    q_ptr,  # [channels, rows]: written
    e_ptr,  # [columns, rows]: written
    pivots_ptr,  # [columns]
    loss_ptr,  # [rows]: the loss of the block is added
    columns,
    rows,
    start,  # number of the first column
    first,  # the first channel for which there are scales
    size,  # number of channels of a group
    ROUND: tl.constexpr,
    P: tl.constexpr,
    BY_RECIPROCAL: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Round the columns of a block one after another.

    Column k is rounded from ``t_k = base_k + Σ_{j<k} e_j feedback_jk``. e_j is the error of column j.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < rows
    column = tl.arange(0, BLOCK)
    is_column = column < columns
    tile = tl.load(base_ptr + column[:, None] * rows + row[None, :], mask=is_column[:, None] & is_row[None, :], other=0.0)
    added, loss = tl.zeros_like(tile), tl.zeros([ROWS], tl.float32)
    for k in range(columns):
        channel = tl.cast(start, tl.int64) + k
        if order_ptr is not None:
            channel = tl.load(order_ptr + channel)
        group = (channel - first) // size * rows + row
        scale = tl.load(scale_ptr + group, mask=is_row, other=1.0)
        factor = tl.load(factor_ptr + group, mask=is_row, other=1.0)
        weight = tl.load(weight_ptr + k * rows + row, mask=is_row, other=0.0)
        feedback = tl.load(feedback_ptr + k * columns + column, mask=is_column, other=0.0)
        t = _taken(tile, column == k)
        if causal_ptr is not None:
            more = _taken(added, column == k)
            t, weight = t + more, weight + more
            causal = tl.load(causal_ptr + k * columns + column, mask=is_column, other=0.0)
            added = _plus_outer_product(added, causal, t)
            tl.store(t_ptr + k * rows + row, t, mask=is_row)
        zero = None
        if zero_ptr is not None:
            zero = tl.load(zero_ptr + group, mask=is_row, other=0).to(tl.float32)
        q = _on_grid(t, factor, scale, zero, ROUND, P, BY_RECIPROCAL)
        error = weight - q
        tl.store(q_ptr + channel * rows + row, q, mask=is_row)
        tl.store(e_ptr + k * rows + row, error, mask=is_row)
        tile = _plus_outer_product(tile, feedback, error)  # additions to columns up to k are never read
        loss += (t - q) * (t - q) * tl.load(pivots_ptr + k)
    tl.store(loss_ptr + row, loss + tl.load(loss_ptr + row, mask=is_row, other=0.0), mask=is_row)


def round_block(rounder: ColumnRounder, base: Tensor, weight: Tensor, factor: Factor, done: Swept, start: int) -> None:
    """Round a block of columns, and write the result into ``done``.

    All tensors are float32 and on one device.

    Args:
        rounder: The rounder of the columns. It stores the scales and the order of the channels. The number
            format must have device code.
        base: The values to round, ``[columns, N]``. The errors of earlier blocks are already compensated in
            these values. The errors of this block are not.
        weight: The original weight, ``[columns, N]``. The error is the difference between this weight and the
            rounded value.
        factor: The factor of H. Row k of the matrix A determines how the error of column k changes later
            columns. The pivots are the weights of the columns in the loss.
        done: The result object. The rounded values, the errors and the loss are written into it. The values
            of a column are written to the row of the column's channel.
        start: Number of the first column.
    """
    code, block = rounder.device_code, slice(start, start + len(base))
    assert code is not None
    columns, rows = base.shape
    scales = rounder.scales.map(Tensor.contiguous)
    of_errors, causal = (None if x is None else x[block, block].contiguous() for x in (factor.a, done.causal))
    e, t = done.e[block], None if done.t is None else done.t[block]
    assert all(x is None or x.is_contiguous() for x in (done.q, e, t))
    with launching_on(base.device):
        _round_columns[(triton.cdiv(rows, ROWS),)](
            base.contiguous(),
            weight.contiguous(),
            of_errors,
            causal,
            t,
            scales.scale if scales.inverse is None else scales.inverse,
            scales.scale,
            scales.zero,
            rounder.order,
            done.q,
            e,
            factor.pivots[block],
            done.loss,
            columns,
            rows,
            start,
            rounder.first,
            rounder.size,
            ROUND=code.round,
            P=code.parameters,
            BY_RECIPROCAL=scales.inverse is not None,
            BLOCK=triton.next_power_of_2(columns),
            ROWS=ROWS,
            num_warps=1,
            enable_fp_fusion=False,
        )
