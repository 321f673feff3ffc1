"""Tables that fold: the numbers behind a plot, for who wants to read them and for screen readers."""

from __future__ import annotations

from collections.abc import Sequence

from quark_workbench.report.svg import Markup, tag

__all__ = ["MOST_ROWS", "folded_table", "table"]

MOST_ROWS = 300
"""Rows of a table on the page; the JSON file has all of them."""


def table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str | Markup]], text: int = 1) -> Markup:
    """Return a table in a box that scrolls.

    Args:
        caption: What it lists.
        heads: Titles of the columns.
        rows: Cells; the first is the head of its row.
        text: How many of the first columns are text, and not numbers.
    """
    if len(rows) > MOST_ROWS:
        caption = f"{caption} The first {MOST_ROWS} of {len(rows):,} rows; quark_report.json has all."
    head = tag("tr", *(tag("th", h, scope="col", class_="t" if i < text else None) for i, h in enumerate(heads)))
    body = [
        tag(
            "tr",
            tag("th", row[0], scope="row", class_="t"),
            *(tag("td", c, class_="t" if i < text else None) for i, c in enumerate(row[1:], 1)),
        )
        for row in rows[:MOST_ROWS]
    ]
    grid = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *body))
    return tag("div", grid, class_="table", tabindex="0", role="group", aria_label=f"Table: {caption}")


def folded_table(summary: str, caption: str, heads: Sequence[str], rows: Sequence[Sequence[str | Markup]], text: int = 1) -> Markup:
    """Return a table under a line that opens it; arguments as of `table`."""
    return tag("details", tag("summary", summary), table(caption, heads, rows, text))
