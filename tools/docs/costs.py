"""A table of the costs that `tools.costs` has recorded."""

from __future__ import annotations

from tools.costs import recorded
from tools.docs.tables import markdown_table

__all__ = ["table"]


def table() -> str:
    """Return the table of all counted runs, and the reasons for costs that have risen."""
    titles = ["run", "FLOPs ÷ a forward", "bytes ÷ weights", "operations a block", "waits for a device"]
    rows = [
        [name, f"{cost.flops:.2f}", f"{cost.bytes:.0f}", str(cost.operations), "" if cost.waits is None else str(cost.waits)]
        for name, cost in recorded.read().items()
    ]
    return markdown_table(titles, rows)
