"""Casts of computed values to a narrower dtype that do not overflow to infinity.

Rounding may go up: the largest magnitude of a symmetric INT4 tensor lies at 7.5 steps and is rounded to 8.
For a float16 tensor whose largest magnitude is 62,000 that gives 66,133, which is beyond float16.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["cast_finite", "keep_finite_"]

_LARGEST_OF_NARROW = 2.0**120
"""A dtype whose largest value exceeds this has float32's exponents, so that every float32 result fits into
it.
"""


def cast_finite(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``values`` in ``dtype``, those beyond its range as its largest finite value; NaN stays NaN."""
    limit = torch.finfo(dtype).max
    return values.to(dtype) if limit > _LARGEST_OF_NARROW else values.clamp(-limit, limit).to(dtype)


def keep_finite_(x: Tensor) -> Tensor:
    """Replace infinities in ``x`` by the largest finite value of its dtype, in place; NaN stays NaN.

    Returns ``x``.
    """
    limit = torch.finfo(x.dtype).max
    return x if limit > _LARGEST_OF_NARROW else x.clamp_(-limit, limit)
