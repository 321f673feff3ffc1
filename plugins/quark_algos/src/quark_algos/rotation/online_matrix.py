"""The Hadamard matrices of online rotations, in the form of AMD Quark 0.13.

A matrix is the Kronecker product of a small one and Sylvester's of a power of two, ``A ⊗ S``, with the
smallest possible order of A. AMD Quark 0.13 uses its own matrix for a whole layer, not that of the
checkpoint; the outputs are equal as long as its table and ours agree: they do for powers of two and for 2^k
times 12, 20, 28, 36, 60, 108 and 140.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from quark_algos.rotation.hadamard import LARGEST_FACTOR, factors_of, transform
from quark_algos.rotation.paley import as_published, has_order

__all__ = ["base_order", "is_own", "matrix_of", "product"]

_ROWS = 1024
"""Rows of a matrix that are computed at a time, to bound memory."""


def product(x: Tensor, size: int) -> Tensor:
    """Return ``x · M`` for the matrix M of that size, not normalized.

    Args:
        x: ``[…, size]``, float32 or float64.
        size: Order of a Hadamard matrix that is known here.

    Returns:
        ``[…, size]``, a new tensor of the dtype of ``x``, on its device.

    Raises:
        ConfigError: No Hadamard matrix of that order is known here.
    """
    base = base_order(size)
    if base == 1 or base is None:
        return transform(x, size)
    by_base = transform(x.unflatten(-1, (base, size // base)), size // base)
    return (_small(base, x.dtype, str(x.device)).t() @ by_base).flatten(-2)


@cache
def base_order(size: int) -> int | None:
    """Return the order of A; 1 if M is Sylvester's; None if M is a product of several small matrices, in the order of `factors_of`."""
    twos = size & -size
    odd = size // twos
    if odd == 1:
        return 1
    if size % 40 == 0 and odd == 5:
        return 40
    orders = (odd * 2**power for power in range(2, twos.bit_length()))
    return next((m for m in orders if m <= LARGEST_FACTOR and has_order(m)), None)


def matrix_of(size: int) -> Tensor:
    """Return M, ``[size, size]``, int8, each value 1 or -1, on the CPU; raises as `product`."""
    matrix = torch.empty(size, size, dtype=torch.int8)
    for start in range(0, size, _ROWS):
        matrix[start : start + _ROWS] = _rows(size, start, matrix.device)
    return matrix


def is_own(matrix: Tensor) -> bool:
    """Return whether a matrix is `matrix_of` its size; compared in parts, so that memory for a second matrix is not needed."""
    size = len(matrix)
    parts = range(0, size, _ROWS)
    return factors_of(size) is not None and all(
        torch.equal(matrix[start : start + _ROWS], _rows(size, start, matrix.device)) for start in parts
    )


def _rows(size: int, start: int, device: torch.device) -> Tensor:
    count = min(_ROWS, size - start)
    unit = torch.zeros(count, size, dtype=torch.float32, device=device)
    unit[torch.arange(count), start + torch.arange(count)] = 1
    return product(unit, size).to(torch.int8)


@cache
def _small(order: int, dtype: torch.dtype, device: str) -> Tensor:
    return as_published(order).to(device=device, dtype=dtype)
