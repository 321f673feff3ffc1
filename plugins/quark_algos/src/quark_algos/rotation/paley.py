"""Hadamard matrices whose orders are not powers of two, constructed from finite fields and from circulants.

A Hadamard matrix H of order m has only the values 1 and -1, and ``H · Hᵀ = m · I``.

Paley's constructions do not give the orders 92, 116 and 172. The matrices of these orders consist of four
symmetric circulants with the values 1 and -1. The circulants were found by an exhaustive search. For the
order 172, only those circulants of order 43 were searched that are invariant under cubes of roots of unity.
Baumert, Golomb and Hall ("Discovery of an Hadamard matrix of order 92", 1962), Baumert (1966) and Williamson
(1944) found such circulants first. The orders 156, 188, 236 and 428 are not supported. For 156, the search
would take too long. For 188 and 236, no such circulants exist, and for 428, no such circulants are known.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import torch
from torch import Tensor

__all__ = ["WILLIAMSON", "as_published", "hadamard", "has_order"]


WILLIAMSON: dict[int, tuple[str, str, str, str]] = {
    23: ("+++-+++-+---", "+-++-++--+++", "+++---++-+-+", "++---+---+-+"),
    29: ("++-+-++++--+---", "++-+-++----+--+", "+-+--+-+++++--+", "++-++-+++---+++"),
    43: ("++-+-++++----+----+--+", "++++--++-+-++-+---+-++", "+--+++--++-+-+-+--++++", "++---+++++++-+--++--+-"),
}
"""A dictionary from the order n of four circulants to the signs in their first rows.

There are signs for the first ``(n + 1) / 2`` values of a row. The other values mirror these. The sum of the
squares of the four circulants is ``4 n I``. The Hadamard matrix has the order 4 n.
"""


_PLUS_ROW = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
_MINUS_ROW = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)


def has_order(m: int) -> bool:
    """Return whether `hadamard` can construct a matrix of the order m.

    The result is False for orders that need a Kronecker product with Sylvester's matrix, except for the order
    2.
    """
    return m == 1 or m == 2 or (m > 0 and m % 4 == 0 and (_paley_kind(m) is not None or m // 4 in WILLIAMSON))


@cache
def hadamard(m: int) -> Tensor:
    """Return a Hadamard matrix of the order m. Its first column has only ones.

    Possible orders are 1 and 2, q + 1 for prime powers q ≡ 3 mod 4, and 2 (q + 1) for prime powers q ≡ 1 mod
    4 (R. Paley, "On orthogonal matrices", 1933). Other orders come from Williamson's array of four symmetric
    circulants (J. Williamson, "Hadamard's determinant theorem and the sum of four squares", 1944).

    Args:
        m: The order. `has_order` must be true for it.

    Returns: A float64 tensor ``[m, m]``. Each value is 1 or -1. The tensor is cached, so do not write to it.

    Raises:
        ValueError: There is no construction for this order.
    """
    if m <= 2:
        found = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)[:m, :m]
    elif (kind := _paley_kind(m)) is not None:
        found = _paley_one(m - 1) if kind == 1 else _paley_two(m // 2 - 1)
    elif m % 4 == 0 and m // 4 in WILLIAMSON:
        found = _williamson(WILLIAMSON[m // 4])
    else:
        raise ValueError(f"quark cannot construct a Hadamard matrix of order {m}. Use a divisor for which has_order() is true")
    return found * found[:, :1]


@cache
def as_published(m: int) -> Tensor:
    """Return the Hadamard matrix of the order m that other programs use, too.

    If m − 1 is a prime for which Paley's first construction is possible, the result is this construction with
    a positive first column. Otherwise, if m / 2 − 1 is a prime for which Paley's second construction is
    possible, the result is this construction, arranged in four blocks. In all other cases, the result is the
    same as the result of `hadamard`. AMD Quark 0.13 has the same matrices for the orders 12, 20, 28, 36, 60,
    108 and 140. Its matrix of the order 40 is the Kronecker product of matrices of the orders 2 and 20.

    Args:
        m: The order. It must be 40, or an order for which `has_order` is true.

    Returns: A float64 tensor ``[m, m]``. Each value is 1 or -1, and the first column may have both. The
    tensor is cached, so do not write to it.

    Raises:
        ValueError: There is no construction for this order.
    """
    if m == 40:
        return torch.kron(hadamard(2), as_published(20))
    if m % 4 == 0 and (_prime_power(m - 1) or (0, 0))[1] == 1:
        found = _paley_one(m - 1)
        signs = torch.ones(m, dtype=torch.float64).index_fill_(0, torch.tensor([0]), -1)
        return found * signs[:, None] * signs
    q = m // 2 - 1
    if m % 4 == 0 and q % 4 == 1 and (_prime_power(q) or (0, 0))[1] == 1:
        conference, unit = _bordered(q), torch.eye(q + 1, dtype=torch.float64)
        return torch.kron(_PLUS_ROW, conference) + torch.kron(_MINUS_ROW, unit)
    return hadamard(m)


@cache
def _paley_kind(m: int) -> int | None:
    if m % 4:
        return None
    if (m - 1) % 4 == 3 and _prime_power(m - 1):
        return 1
    return 2 if (m // 2 - 1) % 4 == 1 and _prime_power(m // 2 - 1) else None


def _paley_one(q: int) -> Tensor:
    """Return the matrix ``I + S`` of Paley's first construction.

    S is skew-symmetric, and ``S · Sᵀ = q · I``.
    """
    bordered = _bordered(q)
    bordered[1:, 0] = -1
    return bordered + torch.eye(q + 1, dtype=torch.float64)


def _paley_two(q: int) -> Tensor:
    """Return the matrix of Paley's second construction.

    It has a block ``[2, 2]`` for each value of a symmetric conference matrix.
    """
    return torch.kron(_bordered(q), _PLUS_ROW) + torch.kron(torch.eye(q + 1, dtype=torch.float64), _MINUS_ROW)


def _bordered(q: int) -> Tensor:
    """Return a matrix of the values ``χ(a - b)``, with a border of ones. a and b are all elements of the
    field of order q.

    χ is 1 for nonzero squares, -1 for other nonzero elements, and 0 for 0. The result is ``[q + 1, q + 1]``,
    and the corner of the border is 0.
    """
    p, n = _prime_power(q) or (q, 1)
    places = p ** torch.arange(n)
    elements = torch.arange(q)[:, None] // places % p
    character = torch.full((q,), -1.0, dtype=torch.float64)
    character[_squares(p, n)] = 1.0
    character[0] = 0.0
    bordered = torch.ones(q + 1, q + 1, dtype=torch.float64)
    bordered[0, 0] = 0.0
    bordered[1:, 1:] = character[((elements[:, None] - elements) % p * places).sum(-1)]
    return bordered


def _squares(p: int, n: int) -> Tensor:
    """Return the indices of the nonzero squares in the field of order ``p ** n``.

    The digits of an element's index in base p are the coefficients of the element. The field is constructed
    with a polynomial of degree n. A polynomial is suitable if half of all nonzero elements are squares and
    only 0 has the square 0.
    """
    places = p ** torch.arange(n)
    elements = torch.arange(1, p**n)[:, None] // places % p
    squared = torch.zeros(len(elements), 2 * n - 1, dtype=torch.int64)
    for i in range(n):
        squared[:, i : i + n] += elements[:, i : i + 1] * elements
    for low in product(range(p), repeat=n):  # x ** n is replaced by this polynomial
        reduced = squared % p
        for degree in range(2 * n - 2, n - 1, -1):
            reduced[:, degree - n : degree] += reduced[:, degree : degree + 1] * torch.tensor(low)
        numbers = (reduced[:, :n] % p * places).sum(-1).unique()
        if len(numbers) == (p**n - 1) // 2 and int(numbers[0]) > 0:
            return numbers
    raise AssertionError(f"there is a field of order {p}^{n}")


def _williamson(halves: tuple[str, str, str, str]) -> Tensor:
    """Return Williamson's array of four symmetric circulants A, B, C and D with
    ``A² + B² + C² + D² = 4 n I``.
    """
    a, b, c, d = (_symmetric_circulant(half) for half in halves)
    rows = ((a, b, c, d), (-b, a, -d, c), (-c, d, a, -b), (-d, -c, b, a))
    return torch.cat([torch.cat(row, dim=1) for row in rows])


def _symmetric_circulant(half: str) -> Tensor:
    """Return a symmetric circulant matrix of order n.

    The first row begins with the ``(n + 1) / 2`` signs of ``half``.

    The other values of the first row mirror these signs.
    """
    first = torch.tensor([1.0 if sign == "+" else -1.0 for sign in half], dtype=torch.float64)
    row = torch.cat([first, first[1:].flip(0)])
    index = torch.arange(len(row))
    return row[(index - index[:, None]) % len(row)]


@cache
def _prime_power(q: int) -> tuple[int, int] | None:
    """Return the prime and the exponent if q is a power of a prime. Otherwise return None."""
    if q < 2:
        return None
    p = next((d for d in range(2, int(q**0.5) + 1) if q % d == 0), q)
    n = 1
    while p**n < q:
        n += 1
    return (p, n) if p**n == q else None
