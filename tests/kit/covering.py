"""A few combinations of parameters instead of all."""

from __future__ import annotations

import zlib
from collections.abc import Sequence


def covering(rows: Sequence[tuple[int, ...]], name: str, most: int) -> list[int]:
    """Return the numbers of the rows to keep, in ascending order: at most ``most``, unless the rows are few.

    They lie on a diagonal, so that a value meets different values of the other columns: the k-th row has the
    k-th value of each column, and values begin again if a column has fewer. With at most ``most`` values in
    the longest column, every value of every column is in a row. Of more, some are, at even distances; which
    ones depends on ``name``, so that the tests together have every value.

    Args:
        rows: Rows of each combination, the number of the value of each parameter, from 0.
        name: Name of the test function.
        most: How many values of a column are kept.
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
