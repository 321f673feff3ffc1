"""Choose a few combinations of a test's parameters instead of all."""

from __future__ import annotations

import zlib
from collections.abc import Sequence


def covering(rows: Sequence[tuple[int, ...]], name: str, most: int) -> list[int]:
    """Return the numbers of at most ``most`` combinations to keep, in ascending order.

    A column has the values of one parameter. The k-th combination has the k-th value of each column, modulo
    the column's length. So a value meets different values of the other columns. If the longest column has at
    most ``most`` values, every value of every column is kept. If it has more, the kept values are evenly
    spaced. They start at a value that depends on ``name``, so that all tests together have every value.

    Args:
        rows: Each combination as the numbers of its parameters' values, from 0.
        name: Name of the test function.
        most: Number of values of a column to keep.
    """
    numbers = {row: number for number, row in reversed(list(enumerate(rows)))}
    sizes = [1 + max(column) for column in zip(*rows, strict=True)]
    longest = max(sizes, default=1)
    start = zlib.crc32(name.encode())
    places = [start + k * longest // most for k in range(most)] if longest > most else range(longest)
    diagonal = (tuple(place % size for size in sizes) for place in places)
    chosen = {numbers[row] for row in diagonal if row in numbers}
    if longest <= most or not chosen:
        seen = {value for number in chosen for value in enumerate(rows[number])}
        for number, row in enumerate(rows):
            if not seen.issuperset(enumerate(row)) and len(chosen) < most:
                chosen.add(number)
                seen.update(enumerate(row))
    return sorted(chosen or {0})
