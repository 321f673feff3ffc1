"""Samples of a quantized matrix: some of its rows, and the scales of these, for checks and figures of a part of it."""

from __future__ import annotations

from torch import Tensor

from quark.numbers.granularity import Granularity
from quark.numbers.qparams import QParams

__all__ = ["qparams_of_rows", "sample_of_rows"]


def sample_of_rows(granularity: Granularity, shape: tuple[int, ...], elements: int) -> slice | None:
    """Return rows, spread evenly where that is possible, of about that many elements; None where a tensor is to be taken whole.

    Args:
        granularity: Of the scales. Rows that share them stay together.
        shape: Of the tensor; only matrices are sampled.
        elements: At least one row is returned, or as many as share their scales.
    """
    count = max(1, elements // max(1, shape[-1]))
    if len(shape) != 2 or count >= shape[0]:
        return None
    if (high := granularity.rows_per_scale) > 1:
        return slice(0, max(high, count // high * high))
    return slice(None, None, -(-shape[0] // count) | 1)  # odd, so that the rows are not all the same row of an attention head


def qparams_of_rows(granularity: Granularity, shape: tuple[int, ...], qparams: QParams, rows: slice) -> QParams:
    """Return the scales of rows of a matrix of that shape; rows that share them are all among ``rows``."""

    def part(tensor: Tensor) -> Tensor:
        return granularity.reduce_scale(granularity.expand_scale(tensor, shape)[rows], (len(range(*rows.indices(shape[0]))), shape[1]))

    zero, outer = qparams.zero_point, qparams.outer_scale
    outer = outer if outer is None or outer.ndim == 0 else outer[rows]
    return QParams(part(qparams.scale), None if zero is None else part(zero), outer)
