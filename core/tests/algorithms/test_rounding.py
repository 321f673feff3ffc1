"""RoundingTask: ranks share the rows of its weights, and all of them get all results."""

from __future__ import annotations

import pytest

from quark.algorithms import RoundingTask
from quark_devkit.threads import in_threads


@pytest.mark.parametrize(
    ("size", "rows", "is_deterministic", "expected"),
    [
        pytest.param(1, 5, False, [(0, 5, 0)], id="one rank has all rows"),
        pytest.param(2, 5, False, [(0, 3, 0), (3, 5, 1)], id="each rank has a slice"),
        pytest.param(2, 600, True, [(0, 200, 0), (200, 400, 1), (400, 600, 1)], id="slices do not depend on the number of ranks"),
    ],
)
def test_by_rows_gives_the_results_of_all_slices_in_order_on_every_rank(
    size: int, rows: int, is_deterministic: bool, expected: list[tuple[int, int, int]]
) -> None:
    results = in_threads(
        lambda ranks: RoundingTask({}, ranks=ranks).by_rows(lambda part: (part.start, part.stop, ranks.rank), rows),
        size,
        is_deterministic=is_deterministic,
    )
    assert results == [expected] * size
