"""Data: symmetric circulants of +1 and -1 for orders of Hadamard matrices that Paley does not reach: 92, 116 and 172.

Found by an exhaustive search (for 43 among those that the cubes of some roots of unity leave as they are), as
Baumert, Golomb and Hall ("Discovery of an Hadamard matrix of order 92", 1962), Baumert (1966) and Williamson
(1944) first did. Orders 156, 188, 236 and 428 are left out: for 156 the search is long, and for the others no
such circulants exist (188, 236) or none are known.
"""

from __future__ import annotations

__all__ = ["WILLIAMSON"]

WILLIAMSON: dict[int, tuple[str, str, str, str]] = {
    23: ("+++-+++-+---", "+-++-++--+++", "+++---++-+-+", "++---+---+-+"),
    29: ("++-+-++++--+---", "++-+-++----+--+", "+-+--+-+++++--+", "++-++-+++---+++"),
    43: ("++-+-++++----+----+--+", "++++--++-+-++-+---+-++", "+--+++--++-+-+-+--++++", "++---+++++++-+--++--+-"),
}
"""By the order n of the circulants, the signs of the first ``(n + 1) / 2`` values of each first row; the rest mirrors them. The squares of
the four sum to ``4 n I``. The matrix is of order 4 n."""
