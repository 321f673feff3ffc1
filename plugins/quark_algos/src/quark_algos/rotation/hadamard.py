"""Fast products of a tensor's last axis with Hadamard matrices. The axis is multiplied as a whole or in
blocks.

Rotations of this kind spread outliers over channels.

The order of a square matrix is its number of rows. An order K is factored into orders for which
`quark_algos.rotation.paley` constructs matrices. The tensor is multiplied by these matrices one after
another, which gives the product with their Kronecker product. This needs K · (sum of the orders)
multiplications per vector; the product with a dense matrix would need K².
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
"""The largest order of a factor. With larger dense factors, it would be faster to rotate in smaller
blocks.
"""

_RADIX = 32
"""The largest factor into which a power of two is split. So memory is read only a few times, and each product
is with a small matrix.
"""


@cache
def factors_of(order: int) -> tuple[int, ...] | None:
    """Return the orders of the Hadamard matrices whose Kronecker product is a matrix of the order ``order``.

    If there are several possibilities, the result is the one with the smallest sum of orders.

    Args:
        order: The order of the product, above 0.

    Returns: A tuple that has first the orders that are not powers of two, and then powers of two up to 32. It
    is empty for the order 1. The result is None if this plugin cannot construct such matrices.
    """
    twos = order & -order
    factors = _odd_factors(order // twos, twos)
    return None if factors is None else (*factors, *_powers_of_two(order // prod(factors)))


def largest_order(width: int) -> int:
    """Return the largest divisor of ``width`` that is the order of a Hadamard matrix of this plugin. The
    result is at least 1.
    """
    return next(width // parts for parts in range(1, width + 1) if width % parts == 0 and factors_of(width // parts) is not None)


def transform(x: Tensor, order: int, *, transposed: bool = False) -> Tensor:
    """Return ``x · H``. H is a Hadamard matrix with values 1 and -1, and its first column has only ones.

    Args:
        x: A tensor ``[…, order]``, float32 or float64.
        order: The order of H. The result of `factors_of` must not be None for this order.
        transposed: Whether to multiply by ``Hᵀ`` instead of H.

    Returns: A new tensor ``[…, order]`` with the dtype and device of ``x``.

    Raises:
        ConfigError: This plugin has no Hadamard matrix of this order.
    """
    factors = factors_of(order)
    if factors is None:
        raise ConfigError(f"quark has no Hadamard matrix of order {order}. Rotate in blocks of {largest_order(order)}")
    shape, right = x.shape, order
    for factor in factors:
        right //= factor
        matrix = _matrix(factor, x.dtype, str(x.device))
        matrix = matrix.t() if transposed else matrix
        # The factor is multiplied from the side on which rows are long and contiguous.
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
    """Return factors whose product is ``odd`` times a power of two, or None if there are no such factors.

    The power of two must divide ``twos``, and each factor must be the order of a Hadamard matrix that can be
    constructed. If there are several possibilities, the result has the smallest sum.
    """
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
    """Split a power of two into as few factors as possible.

    Each factor is at most `_RADIX`, and the factors are of nearly equal size.
    """
    exponent, most = order.bit_length() - 1, _RADIX.bit_length() - 1
    count = -(-exponent // most)
    return tuple(2 ** (exponent // count + (i < exponent % count)) for i in range(count))


@attrs.frozen(eq=False)
class Rotation:
    """A block-diagonal orthogonal matrix R, ``[width, width]``. Its blocks are ``diag(signs) · H / √block``.

    A rotation that preserves the mean over channels has the blocks ``H · diag(signs) · Hᵀ / block`` instead.
    The first sign of each block is +1. H maps the first unit vector to a vector of ones, so R maps a vector
    of ones to itself. For this reason, R does not change the mean, and LayerNorm commutes with R. RMSNorm
    commutes with any rotation. All entries of ``H / √block`` have the magnitude ``1 / √block``. If signs are
    random, the entries of ``H · diag(signs) · Hᵀ / block`` have different magnitudes, but their root mean
    square has the same value.

    Signs and blocks come from QuaRot (arXiv 2404.00456). The rotation that preserves the mean is derived from
    the definition of LayerNorm.

    Attributes:
        width: Number of channels.
        block: Order of the Hadamard matrix H. It divides the width.
        signs: The signs, 1 or -1, as an int8 tensor ``[width]`` on the CPU. None means that all signs are +1.
        keeps_mean: Whether R preserves the mean over channels.
    """

    width: int
    block: int
    signs: Tensor | None = None
    keeps_mean: bool = False

    def __attrs_post_init__(self) -> None:
        if self.block < 1 or self.width < 1 or self.width % self.block:
            raise ConfigError(f"the width {self.width} is not a multiple of rotation_size {self.block}. Choose a divisor of the width")
        if factors_of(self.block) is None:
            fix = f"Choose {largest_order(self.block)}"
            raise ConfigError(f"quark has no Hadamard matrix of the order rotation_size={self.block}. {fix}")
        if self.signs is not None and tuple(self.signs.shape) != (self.width,):
            raise ConfigError(
                f"a rotation of width {self.width} got signs of shape {tuple(self.signs.shape)}. Give one sign for each channel"
            )

    @classmethod
    def of(cls, width: int, size: int | None = None, seed: int | None = None, *, keeps_mean: bool = False) -> Self:
        """Return a rotation for ``width`` channels.

        Args:
            width: Number of channels, above 0.
            size: Block size. If it is None, the largest possible size is used, which is usually the width.
            seed: Seed for random signs. The signs are the same on every device. If it is None, all signs are
                +1. The exception is a rotation that preserves the mean: with signs of +1, it would be the
                identity, so the seed 0 is used.
            keeps_mean: Whether the rotation preserves the mean over channels.

        Raises:
            ConfigError: ``size`` does not divide the width, or this plugin has no Hadamard matrix of this
                order.
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
            x: A tensor ``[…, width]`` with a floating-point dtype, on any device.

        Returns: A new tensor ``[…, width]`` with the dtype and device of ``x``. It is computed in float32 (or
        in float64 if ``x`` is float64) and rounded once.

        Raises:
            ConfigError: The last axis of ``x`` has another size.
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
