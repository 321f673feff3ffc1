"""Cast computed values to a narrower dtype without making infinities of them.

Rounding may go up: the largest magnitude of a symmetric int4 tensor lies at 7.5 steps, and comes back as 8. Of a float16 tensor that
reaches 62,000 that is 66,133, which float16 does not have.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FAR = 2.0**120
"""Dtypes that reach beyond this have float32's exponents: what is computed in float32 fits into them."""


def cast_finite(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``values`` in ``dtype``, those beyond its range as its largest finite value; NaN stays NaN."""
    limit = torch.finfo(dtype).max
    return values.to(dtype) if limit > _FAR else values.clamp(-limit, limit).to(dtype)


def keep_finite_(x: Tensor) -> Tensor:
    """Make infinities of ``x``, which a narrower dtype has made of large values, its largest finite values; in place. NaN stays NaN."""
    limit = torch.finfo(x.dtype).max
    return x if limit > _FAR else x.clamp_(-limit, limit)
