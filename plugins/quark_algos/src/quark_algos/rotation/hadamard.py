"""Fast products with Hadamard matrices along the last axis, whole or block by block.

Such rotations spread outliers over channels.

An order K is factored into orders that `quark_algos.rotation.paley` constructs, and the Kronecker product of
their matrices is applied factor by factor: K · (sum of the orders) multiplications per vector; the dense
matrix takes K².
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Self

import attrs
import torch
from torch import Tensor

from quark.errors import ConfigError
from quark_algos.rotation.paley import hadamard, has_order

__all__ = ["LARGEST_FACTOR", "Rotation", "factors_of", "largest_order", "transform"]

LARGEST_FACTOR = 1024
"""Largest order of a factor: dense factors beyond it are slower than a rotation in smaller blocks."""

_RADIX = 32
"""Largest factor of a power of two: few passes over memory, each a product with a small matrix."""


@cache
def factors_of(order: int) -> tuple[int, ...] | None:
    """Return orders of Hadamard matrices whose Kronecker product has this order, with the smallest sum.

    None if none are known.

    Args:
        order: Order, above 0.

    Returns:
        Orders that are no powers of two first, then powers of two up to 32; ``()`` for order 1.
    """
    twos = order & -order
    factors = _odd_factors(order // twos, twos)
    return None if factors is None else (*factors, *_powers_of_two(order // prod(factors)))


def largest_order(width: int) -> int:
    """Return the largest divisor of ``width`` that is the order of a known Hadamard matrix; at least 1."""
    return next(width // parts for parts in range(1, width + 1) if width % parts == 0 and factors_of(width // parts) is not None)


def transform(x: Tensor, order: int, *, transposed: bool = False) -> Tensor:
    """Return ``x · H`` for the Hadamard matrix H of that order, not normalized; its first column is all ones.

    Args:
        x: ``[…, order]``, float32 or float64.
        order: An order with `factors_of`.
        transposed: Multiply by ``Hᵀ`` instead.

    Returns:
        ``[…, order]``, a new tensor of the dtype of ``x``, on its device.

    Raises:
        ConfigError: No Hadamard matrix of that order is known here.
    """
    factors = factors_of(order)
    if factors is None:
        raise ConfigError(
            f"there is no Hadamard matrix of order {order} here: rotate in blocks of {largest_order(order)}, which divides it"
        )
    shape, right = x.shape, order
    for factor in factors:
        right //= factor
        matrix = _matrix(factor, x.dtype, str(x.device))
        matrix = matrix.t() if transposed else matrix
        # The product is taken on the side with long contiguous rows.
        x = x.reshape(-1, factor) @ matrix if right == 1 else matrix.t() @ x.reshape(-1, factor, right)
    return x.reshape(shape).clone() if not factors else x.reshape(shape)


@cache
def _matrix(order: int, dtype: torch.dtype, device: str) -> Tensor:
    matrix = hadamard(order) if order & (order - 1) else _sylvester(order)
    return matrix.to(device=device, dtype=dtype)


def _sylvester(order: int) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < order:
        matrix = torch.kron(hadamard(2), matrix)
    return matrix


@cache
def _odd_factors(odd: int, twos: int) -> tuple[int, ...] | None:
    """Return the cheapest constructible factors of ``odd`` times a power of two up to ``twos``."""
    if odd == 1:
        return ()
    ways = []
    for part in (d for d in range(3, odd + 1, 2) if odd % d == 0):
        power = 4
        while power <= twos and part * power <= LARGEST_FACTOR:
            rest = _odd_factors(odd // part, twos // power) if has_order(part * power) else None
            if rest is not None:
                ways.append((part * power, *rest))
            power *= 2
    return min(ways, key=sum, default=None)


def _powers_of_two(order: int) -> tuple[int, ...]:
    """Return the fewest factors of a power of two up to `_RADIX`, of nearly equal size."""
    exponent, most = order.bit_length() - 1, _RADIX.bit_length() - 1
    count = -(-exponent // most)
    return tuple(2 ** (exponent // count + (i < exponent % count)) for i in range(count))


@attrs.frozen(eq=False)
class Rotation:
    """A block-diagonal orthogonal matrix R, ``[width, width]``, with the blocks ``diag(signs) · H / √block``.

    A rotation that keeps the mean has the blocks ``H · diag(signs) · Hᵀ / block``, with sign +1 for the first
    channel of each block. H maps the first unit vector to ones, so R maps ones to ones: the mean over
    channels stays, and LayerNorm commutes with R, as RMSNorm does with any rotation. With random signs its
    entries have about the size ``1 / √block``, like ``H / √block``, but they differ.

    Source: QuaRot (arXiv 2404.00456) for signs and blocks; the form that keeps the mean follows from the
    definition of LayerNorm.

    Attributes:
        width: Number of channels.
        block: Order of the Hadamard matrix; it divides the width.
        signs: ``[width]``, int8, each 1 or -1, on the CPU; None for +1 everywhere.
        keeps_mean: Whether R keeps the mean over channels.
    """

    width: int
    block: int
    signs: Tensor | None = None
    keeps_mean: bool = False

    def __attrs_post_init__(self) -> None:
        if self.block < 1 or self.width < 1 or self.width % self.block:
            raise ConfigError(f"the width {self.width} is not a multiple of rotation_size {self.block}: choose a divisor of the width")
        if factors_of(self.block) is None:
            fix = f"take {largest_order(self.block)}, which divides it"
            raise ConfigError(f"rotation_size {self.block} has no Hadamard matrix here: {fix}")
        if self.signs is not None and tuple(self.signs.shape) != (self.width,):
            raise ConfigError(
                f"a rotation of width {self.width} got signs of shape {tuple(self.signs.shape)}: give one sign for each channel"
            )

    @classmethod
    def of(cls, width: int, size: int | None = None, seed: int | None = None, *, keeps_mean: bool = False) -> Self:
        """Return the rotation of a width.

        Args:
            width: Number of channels, above 0.
            size: Block size; None for the largest possible, usually the width.
            seed: Seed of random signs, which are the same on every device; None for no signs. A rotation that
                keeps the mean uses seed 0 instead of None: without signs it would be the identity.
            keeps_mean: Whether the rotation keeps the mean over channels.

        Raises:
            ConfigError: ``size`` does not divide the width, or no Hadamard matrix of that order is known
                here.
        """
        block = largest_order(width) if size is None else size
        if seed is None and not keeps_mean:
            return cls(width, block)
        drawn = torch.randint(2, (width,), generator=torch.Generator().manual_seed(seed or 0), dtype=torch.int8) * 2 - 1
        if keeps_mean:
            drawn[::block] = 1
        return cls(width, block, drawn, keeps_mean)

    def apply(self, x: Tensor) -> Tensor:
        """Return ``x · R`` along the last axis.

        Args:
            x: ``[…, width]``, of a floating dtype, on any device.

        Returns:
            ``[…, width]``, a new tensor with the dtype and device of ``x``; computed in float32 (float64 if
            ``x`` is) and rounded once.

        Raises:
            ConfigError: The last axis has another size.
        """
        if x.ndim == 0 or x.shape[-1] != self.width:
            raise ConfigError(f"a rotation of width {self.width} cannot be applied to a tensor of shape {tuple(x.shape)}")
        master = x.to(torch.float64 if x.dtype is torch.float64 else torch.float32)
        if self.keeps_mean:
            product = self._blocks(self._signed(self._blocks(master)), transposed=True) / self.block
        else:
            product = self._blocks(self._signed(master)) / self.block**0.5
        return product.to(x.dtype)

    def _signed(self, x: Tensor) -> Tensor:
        return x if self.signs is None else x * self.signs.to(device=x.device, dtype=x.dtype)

    def _blocks(self, x: Tensor, *, transposed: bool = False) -> Tensor:
        return transform(x.unflatten(-1, (-1, self.block)), self.block, transposed=transposed).flatten(-2)
