"""Elements of HTML and inline SVG as strings, escaped, with short numbers; headings, legends and tables."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

__all__ = [
    "MOST_ROWS",
    "Markup",
    "drawing",
    "figure",
    "figure_text",
    "folded_table",
    "heading",
    "joined",
    "legend",
    "legend_key",
    "level",
    "nice_ticks",
    "number",
    "numbered",
    "path",
    "picture",
    "table",
    "tag",
    "text",
]


class Markup(str):
    """Text that is markup already, so that `tag` does not escape it."""

    __slots__ = ()


def tag(name: str, *content: str | None, **attributes: object) -> Markup:
    """Return an element.

    Args:
        name: Of the element.
        content: Markup, which stays as it is, and other text, which is escaped; None is left out.
        attributes: Escaped; ``_`` at the end of a name is taken off (``class_``), others become ``-``. None
            and False are left out.

    >>> tag("p", "a < b", class_="note")
    '<p class="note">a &lt; b</p>'
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(number(value) if isinstance(value, float) else str(value))}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Markup(f"<{name}{written}>{joined(content)}</{name}>")


def joined(content: Iterable[str | None]) -> Markup:
    """Return pieces of markup and of other text, which is escaped, one after another."""
    return Markup("".join(c if isinstance(c, Markup) else html.escape(c) for c in content if c is not None))


def number(value: float) -> str:
    """Return a coordinate: two digits behind the point at most.

    >>> number(3.0), number(3.14159), number(-0.001)
    ('3', '3.14', '0')
    """
    short = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if short in ("-0", "") else short


def text(x: float, y: float, content: str, class_: str | None = None, anchor: str | None = None) -> Markup:
    """Return text in a plot; ``anchor`` is ``middle`` or ``end``."""
    return tag("text", content, x=float(x), y=float(y), class_=class_, text_anchor=anchor)


def path(points: Sequence[tuple[float, float]], class_: str, *, closed: bool = False) -> Markup:
    """Return a path of straight lines through points."""
    steps = "".join(f"{'L' if i else 'M'}{number(x)} {number(y)}" for i, (x, y) in enumerate(points))
    return tag("path", d=steps + ("Z" if closed else ""), class_=class_)


def numbered(count: int, x_of: Callable[[int], float], y: float) -> list[Markup]:
    """Return the numbers of places below a plot, at most about 32 of them."""
    return [text(x_of(i), y, str(i), anchor="middle") for i in range(0, count, max(1, math.ceil(count / 32)))]


def level(y: float, left: float, right: float, label: str) -> list[Markup]:
    """Return a horizontal line of the grid, with its label on the left."""
    return [path([(left, y), (right, y)], "grid"), text(left - 8, y + 4, label, anchor="end")]


def figure(name: str, title: str, description: str, width: float, height: float, *content: str, least: int | None = None) -> Markup:
    """Return a plot in a box that scrolls.

    Args:
        name: Id of the plot, unique in the page.
        title: What it shows, for screen readers.
        description: What there is to be seen in it, in words.
        width: Of the drawing, in its own units: about pixels.
        height: Likewise.
        content: What is drawn.
        least: Width in pixels below which it is scrolled and not made smaller; None for 0.85 of ``width``.
    """
    style = f"min-width:{least or round(0.85 * width)}px;max-width:{number(max(width, 320))}px"
    drawn = drawing(name, title, description, width, height, *content, style=style)
    return tag("div", drawn, class_="scroll", tabindex="0", role="group", aria_label=f"Plot: {title}")


def drawing(name: str, title: str, description: str, width: float, height: float, *content: str, **attributes: object) -> Markup:
    """Return a plot alone; arguments as of `figure`, and further attributes of the element."""
    return tag(
        "svg",
        tag("title", title, id=f"{name}-title"),
        tag("desc", description, id=f"{name}-desc"),
        *content,
        id=name,
        viewBox=f"0 0 {number(width)} {number(height)}",
        role="img",
        aria_labelledby=f"{name}-title",
        aria_describedby=f"{name}-desc",
        class_="plot",
        **attributes,
    )


def picture(style: str, *plot: Any) -> str:
    """Return a plot as a file of its own, with a style sheet; ``plot`` are the arguments of `drawing`."""
    name, title, description, width, height, *content = plot
    rules = tag("style", Markup(style))
    own = {"xmlns": "http://www.w3.org/2000/svg", "font-family": "system-ui, sans-serif", "style": "background:var(--page)"}
    return f"{drawing(name, title, description, width, height, rules, *content, **own)}\n"


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about ``count`` round numbers from at most ``low`` to at least ``high``.

    >>> nice_ticks(0, 23, 5)
    [0.0, 5.0, 10.0, 15.0, 20.0, 25.0]
    """
    span = max(high - low, 1e-12)
    power = 10 ** math.floor(math.log10(span / count))
    step = next(f * power for f in (1, 2, 2.5, 5, 10) if span / (f * power) <= count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) + 0.0 for i in range(first, last + 1)]


def heading(key: str, title: str, lead: str) -> list[Markup]:
    """Return the heading of a section, and the sentences below it; ``key`` is the id of the section."""
    return [tag("h2", title, id=f"{key}-heading"), tag("p", lead, class_="lead")]


def legend(*keys: Markup) -> Markup:
    """Return a legend of entries from `legend_key`."""
    return tag("ul", *keys, class_="legend")


def legend_key(class_: str, name: str, *, round_: bool = False) -> Markup:
    """Return an entry of a legend: a mark of the class of what it stands for, and its name."""
    shape = tag("circle", cx=7, cy=7, r=5, class_=class_) if round_ else tag("rect", width=14, height=14, rx=3, class_=class_)
    return tag("li", tag("svg", shape, viewBox="0 0 14 14", class_="plot", aria_hidden="true"), name)


def figure_text(value: float | None, form: str) -> str:
    """Return a number in a format; a dash where it is None."""
    return "–" if value is None else format(value, form)


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
