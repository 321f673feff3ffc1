"""The table of versions that `tools.matrix` has tested together."""

from __future__ import annotations

from tools.docs.tables import markdown_table
from tools.matrix.cells import CELLS, read

__all__ = ["table"]


def table() -> str:
    """Return the table, with a row for each set of versions in the matrix."""
    results, rows = read(), []
    for cell in CELLS:
        row = [cell.python, cell.torch, cell.transformers, cell.why]
        if (result := results.get(cell.name)) is None:
            rows.append([*row, "not run", "", "", ""])
        else:
            counts = (f"{number:,}" for number in (result.passed, result.failed, result.skipped))
            rows.append([*row, "yes" if result.demo else "no", *counts])
    return markdown_table(["Python", "torch", "transformers", "who has them", "`quark demo`", "passed", "failed", "skipped"], rows)
