"""Functions that return SVG elements of plots as escaped markup: circles, texts, lines, and whole plots."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

from markupsafe import Markup, escape

__all__ = ["dot", "drawing", "figure", "level", "nice_ticks", "number", "numbered", "path", "picture", "style_sheet", "tag", "text"]


def tag(name: str, *content: str, **attributes: object) -> Markup:
    """Return an HTML or SVG element.

    Args:
        name: Name of the element.
        content: The content of the element. A `Markup` object is kept, and other text is escaped.
        attributes: The attributes of the element. Values are escaped; attributes with the value None are left
            out. In a name, a final ``_`` is removed (``class_``), and any other ``_`` becomes ``-``.

    >>> tag("p", "a < b", class_="note")
    Markup('<p class="note">a &lt; b</p>')
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(number(value) if isinstance(value, float) else value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{written}>{Markup().join(content)}</{name}>")


def number(value: float) -> str:
    """Return a coordinate as text with at most two decimals.

    >>> number(3.0), number(3.14159), number(-0.001)
    ('3', '3.14', '0')
    """
    short = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if short in ("-0", "") else short


def text(x: float, y: float, content: str, class_: str | None = None, anchor: str | None = None) -> Markup:
    """Return a text at a place in a plot. ``anchor`` is ``middle`` or ``end``; None aligns at the start."""
    return tag("text", content, x=float(x), y=float(y), class_=class_, text_anchor=anchor)


def path(points: Sequence[tuple[float, float]], class_: str, *, closed: bool = False) -> Markup:
    """Return a path of straight lines through points."""
    steps = "".join(f"{'L' if i else 'M'}{number(x)} {number(y)}" for i, (x, y) in enumerate(points))
    return tag("path", d=steps + ("Z" if closed else ""), class_=class_)


def dot(x: float, y: float, radius: float, class_: str, hint: str = "") -> Markup:
    """Return a circle with a tooltip."""
    return tag("circle", *([tag("title", hint)] if hint else []), cx=float(x), cy=float(y), r=radius, class_=class_)


def numbered(count: int, x_of: Callable[[int], float], y: float) -> list[Markup]:
    """Return labels with the numbers of ``count`` places, from 0. At most 32 of the places get a label.

    ``x_of`` returns the horizontal position of a place, and ``y`` is the vertical position of the labels.
    """
    return [text(x_of(i), y, str(i), anchor="middle") for i in range(0, count, max(1, math.ceil(count / 32)))]


def level(y: float, left: float, right: float, label: str) -> list[Markup]:
    """Return a horizontal line of the grid, with its label on the left."""
    return [path([(left, y), (right, y)], "grid"), text(left - 8, y + 4, label, anchor="end")]


def figure(name: str, title: str, description: str, width: float, height: float, *content: str, least: int | None = None) -> Markup:
    """Return a plot in a box that can be scrolled sideways.

    Args:
        name: Id of the plot, unique in the page.
        title: Title for screen readers.
        description: Description for screen readers.
        width: Width of the drawing, in units of about one pixel.
        height: Height of the drawing, in the same units.
        content: The elements of the drawing.
        least: Smallest width of the plot in pixels. In a narrower window, the plot can be scrolled. None
            means 0.85 of ``width``.
    """
    style = f"min-width:{least or round(0.85 * width)}px;max-width:{number(max(width, 320))}px"
    drawn = drawing(name, title, description, width, height, *content, style=style)
    return tag("div", drawn, class_="scroll", tabindex="0", role="group", aria_label=f"Plot: {title}")


def drawing(name: str, title: str, description: str, width: float, height: float, *content: str, **attributes: object) -> Markup:
    """Return a plot without a box. ``attributes`` are added to the element; see `figure` for the others."""
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


def style_sheet() -> Markup:
    """Return the style sheet of the page and its plots."""
    return Markup((files("quark_workbench.report") / "style.css").read_text(encoding="utf-8"))


def picture(*plot: Any) -> str:
    """Return the content of an SVG file with a plot and a style sheet.

    ``plot`` has the arguments of `drawing`.
    """
    name, title, description, width, height, *content = plot
    rules = tag("style", style_sheet())
    own = {"xmlns": "http://www.w3.org/2000/svg", "font-family": "system-ui, sans-serif", "style": "background:var(--page)"}
    return f"{drawing(name, title, description, width, height, rules, *content, **own)}\n"


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about ``count`` equally spaced round numbers. The first is at most ``low``, the last at least
    ``high``.

    >>> nice_ticks(0, 23, 5)
    [0.0, 5.0, 10.0, 15.0, 20.0, 25.0]
    """
    span = max(high - low, 1e-12)
    power = 10 ** math.floor(math.log10(span / count))
    step = next(f * power for f in (1, 2, 2.5, 5, 10) if span / (f * power) <= count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) + 0.0 for i in range(first, last + 1)]
